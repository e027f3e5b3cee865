"""The evaluations of a run as pages: files that `unspiral eval --suite` left in the run's folder.

The store of a run lies in its folder (`RUN/likelihood.db`), its evaluations in `RUN/eval/NAME/table.html`. In
a folder of runs each has its own. A store elsewhere, or Redis, knows no folder, and has none.
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from fastapi import FastAPI, HTTPException
from fastapi import Path as InPath
from fastapi.responses import FileResponse, HTMLResponse

from services.common.http.faults import described
from services.common.http.pages import CONTENT_POLICY
from services.likelihood.rest.evaluation_list import TABLE, list_page
from services.likelihood.rest.paths import Run
from services.likelihood.store.base import LikelihoodStore
from services.likelihood.store.of_folder import FolderStore
from services.likelihood.store.sqlite.store import SQLiteStore

PAGE = "table.html"
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
HEADERS = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
Name = Annotated[str, InPath(max_length=255)]


def folder_of(store: LikelihoodStore, run: str) -> Path | None:
    """The run's folder, in which its store lies; None where it lies elsewhere, or is no file."""
    if isinstance(store, FolderStore):
        return store.run_folder(run)
    if isinstance(store, SQLiteStore) and store.path.absolute().parent.name == run:
        return store.path.absolute().parent
    return None


def add_evaluation_routes(app: FastAPI, store: LikelihoodStore) -> None:
    """Add /runs/RUN/evaluations, a list, and /runs/RUN/evaluations/NAME, a page of the list; for programs
    /v1/runs/RUN/evaluations and /v1/runs/RUN/evaluations/NAME, the rows of that page."""

    def pages_of(run: str) -> dict[str, Path]:
        folder = folder_of(store, run)
        if folder is None:
            return {}
        return {file.parent.name: file for file in sorted((folder / "eval").glob(f"*/{PAGE}"))}

    def page_of(run: str, name: str) -> Path:
        file = pages_of(run).get(name)
        if file is None:
            raise HTTPException(404, f"run {run} has no evaluation {name}")
        return file

    @app.get("/v1/runs/{run}/evaluations")
    def evaluation_names(run: Run) -> list[str]:
        """Names of the evaluations that have a page, /runs/RUN/evaluations/NAME. Empty where the store does
        not lie in the run's folder."""
        return list(pages_of(run))

    @app.get("/v1/runs/{run}/evaluations/{name}", responses=described(404))
    def evaluation_rows(run: Run, name: Name) -> FileResponse:
        """The evaluation's exact match by column, with intervals, and the rows that papers print."""
        file = page_of(run, name).with_name(TABLE)
        if not file.is_file():
            raise HTTPException(404, f"evaluation {name} of run {run} has no {TABLE}")
        return FileResponse(file, headers={"Cache-Control": "no-cache"}, media_type="application/json")

    @app.get("/runs/{run}/evaluations", response_class=HTMLResponse, include_in_schema=False)
    def evaluations(run: Run) -> HTMLResponse:
        headers = {"Content-Security-Policy": CONTENT_POLICY, "Cache-Control": "no-cache"}
        return HTMLResponse(list_page(run, pages_of(run)), headers=headers)

    @app.get("/runs/{run}/evaluations/{name}", response_class=HTMLResponse, include_in_schema=False)
    def evaluation(run: Run, name: Name) -> HTMLResponse:
        text = page_of(run, name).read_text(encoding="utf-8")
        # The file stands alone elsewhere; here it has a way back.
        back = f'<p><a href="/runs/{quote(run)}/evaluations">← evaluations of {html.escape(run)}</a></p>'
        return HTMLResponse(text.replace("<body>", f"<body>{back}", 1), headers=HEADERS)
