"""One prompt through time over HTTP, and the page that shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Query
from fastapi.responses import FileResponse, HTMLResponse, Response

from services.common.http.faults import described
from services.common.http.pages import CONTENT_POLICY
from services.likelihood.microscope.prompts import MAX_PROMPT, MOST_PROMPTS, KeptPrompt
from services.likelihood.microscope.through_time import MOST_STEPS, PromptSteps, through_time
from services.likelihood.records import MAX_STEP
from services.likelihood.rest.paths import Run
from services.likelihood.rest.sample_routes import JSON, Read
from services.likelihood.store.base import LikelihoodStore


def add_prompt_routes(app: FastAPI, store: LikelihoodStore, read: Read, static: Path) -> None:
    """Add the prompts of a run, one of them through time, and its page."""

    @app.get("/v1/runs/{run}/prompts", responses=described(404))
    def prompts(run: Run, limit: Annotated[int, Query(ge=1, le=10_000)] = MOST_PROMPTS) -> list[KeptPrompt]:
        """The prompts of which trajectories are kept token by token: those that a probe follows first, then
        those of most steps, then the latest."""
        return store.prompts(run, limit)

    @app.get("/v1/runs/{run}/prompts/samples", response_model=PromptSteps, responses=described(404))
    async def prompt_samples(
        run: Run,
        prompt: Annotated[
            str,
            Query(
                min_length=1,
                max_length=MAX_PROMPT,
                description="the question's first 200 characters; the group's name where none was posted",
            ),
        ],
        first: Annotated[int, Query(ge=0, le=MAX_STEP)] = 0,
        last: Annotated[int, Query(ge=0, le=MAX_STEP)] = MAX_STEP,
        limit: Annotated[int, Query(ge=1, le=MOST_STEPS, description="steps")] = 24,
    ) -> Response:
        """The kept trajectories of one prompt, step by step: those that the steps sampled, and those of
        earlier steps that were scored again (`probe`)."""
        return await read(
            lambda: through_time(store, run, prompt, first, last, limit).model_dump_json().encode(), JSON
        )

    @app.get("/runs/{run}/prompts", response_class=HTMLResponse, include_in_schema=False)
    def prompt_page(run: Run) -> FileResponse:
        return FileResponse(
            static / "prompt.html",
            headers={"Content-Security-Policy": CONTENT_POLICY, "Cache-Control": "no-cache"},
        )
