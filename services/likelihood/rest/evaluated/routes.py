"""A run's evaluations as pages: what `unspiral eval` left in its folder, and what its training asked.

The store of a run lies in its folder (`RUN/likelihood.db`). There `eval --suite` leaves
`eval/NAME/table.html`, a plain `eval` its answers (`eval/answers.jsonl`), and training the answers to its
held-out questions (`trajectories/eval_*.jsonl`). In a folder of runs each has its own. A store elsewhere, or
Redis, knows no folder: of such a run the held-out scores that were posted are shown.
"""

from __future__ import annotations

import html
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import FastAPI, HTTPException, Query
from fastapi import Path as InPath
from fastapi.responses import HTMLResponse, RedirectResponse

from services.common.http.faults import described
from services.common.http.pages import CONTENT_POLICY
from services.common.users_files import load_object
from services.likelihood.rest.evaluated.answers_page import Shown, answers_page, missing_page
from services.likelihood.rest.evaluated.beside import add_beside_route, chooser_of
from services.likelihood.rest.evaluated.folders import (
    answers_in,
    evaluations_of,
    folder_of,
    is_stored,
    own_in,
    suites_in,
    trained_in,
    untrained_in,
)
from services.likelihood.rest.evaluated.kept import kept_in, protocol_of, training_files
from services.likelihood.rest.evaluated.list_page import TABLE, list_page
from services.likelihood.rest.paths import Run
from services.likelihood.store.base import LikelihoodStore

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
HEADERS = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
OWN_HEADERS = {"Content-Security-Policy": CONTENT_POLICY, "Cache-Control": "no-cache"}
Name = Annotated[str, InPath(max_length=255)]


def add_evaluation_routes(app: FastAPI, store: LikelihoodStore) -> None:
    """Add /runs/RUN/evaluations, a list, and /runs/RUN/evaluations/NAME, a page of the list; for programs
    /v1/runs/RUN/evaluations and /v1/runs/RUN/evaluations/NAME, the scores of that page."""

    @app.get("/v1/runs/{run}/evaluations")
    def evaluation_names(run: Run, of: Literal["eval", "training"] = "eval") -> list[str]:
        """Names of the evaluations that `unspiral eval` left in the run's folder, or with `of=training` of
        the answers to held-out questions that training kept there; each has a page,
        /runs/RUN/evaluations/NAME. Empty where the store does not lie in the run's folder. The held-out
        scores of training are events: /v1/runs/RUN/events?kind=evaluation."""
        folder = folder_of(store, run)
        if folder is None:
            return []
        if of == "training":
            return [*training_files(folder)]
        return [*suites_in(folder), *own_in(folder)]

    @app.get("/v1/runs/{run}/evaluations/{name}", responses=described(404))
    def evaluation_rows(run: Run, name: Name) -> dict[str, Any]:
        """Of a suite: exact match by column, with intervals, and the rows that papers print. Of other
        questions: `scores` (n, exact match with its 95 % interval, F1, searches, share answered), the same by
        source, and how they were asked."""
        folder = folder_of(store, run)
        if folder and (page := suites_in(folder).get(name)):
            if not page.with_name(TABLE).is_file():
                raise HTTPException(404, f"evaluation {name} of run {run} has no {TABLE}")
            return load_object(page.with_name(TABLE))
        kept = answers_in(folder, name) if folder else None
        if kept is None:
            raise HTTPException(404, f"run {run} has no evaluation {name}")
        trained = trained_in(store, run, folder, name) if folder else None
        return {
            "made": trained.made if trained else kept.file.stat().st_mtime,
            "scores": kept.scores.told(),
            "sources": {source: scores.told() for source, scores in kept.sources.items()},
            **protocol_of(kept.file),
        }

    @app.get("/runs/{run}", include_in_schema=False)
    def page_of(run: Run) -> RedirectResponse:
        return RedirectResponse(f"/#runs={quote(quote(run))}")

    @app.get("/runs/{run}/evaluations", response_class=HTMLResponse, include_in_schema=False)
    def evaluations(run: Run) -> HTMLResponse:
        folder, there = folder_of(store, run), is_stored(store, run)
        if folder is None and not there:
            return HTMLResponse(missing_page(run, None), 404, headers=OWN_HEADERS)
        suites = suites_in(folder) if folder else {}
        files = own_in(folder) if folder else {}
        own = {n: kept for n, file in files.items() if (kept := kept_in(file))}
        asked = training_files(folder) if folder else {}
        others = [name for name in untrained_in(store) if name != run]
        page = list_page(run, suites, own, evaluations_of(store, run), asked, others, there=there)
        return HTMLResponse(page, headers=OWN_HEADERS)

    @app.get("/runs/{run}/evaluations/{name}", response_class=HTMLResponse, include_in_schema=False)
    def evaluation(
        run: Run,
        name: Name,
        show: Annotated[str, Query(pattern="^(all|right|wrong)$")] = "all",
        source: Annotated[str | None, Query(max_length=200)] = None,
        find: Annotated[str, Query(max_length=200)] = "",
        first: Annotated[int, Query(ge=1)] = 1,
        open: Annotated[int, Query(ge=0, le=1)] = 0,
    ) -> HTMLResponse:
        folder = folder_of(store, run)
        if folder and (page := suites_in(folder).get(name)):
            # The file stands alone elsewhere; here it has a way back.
            back = f'<p><a href="/runs/{quote(run)}/evaluations">← evaluations of {html.escape(run)}</a></p>'
            text = page.read_text(encoding="utf-8").replace("<body>", f"<body>{back}", 1)
            return HTMLResponse(text, headers=HEADERS)
        kept = answers_in(folder, name) if folder else None
        if folder is None or kept is None:
            missing = missing_page(run, name, there=is_stored(store, run))
            return HTMLResponse(missing, 404, headers=OWN_HEADERS)
        shown = Shown(show, source, find, first, open)
        trained = trained_in(store, run, folder, name)
        compared = chooser_of(store, run, name)
        text = answers_page(run, name, kept, shown, trained, compared=compared, there=is_stored(store, run))
        return HTMLResponse(text, headers=OWN_HEADERS)

    add_beside_route(app, store, OWN_HEADERS)
