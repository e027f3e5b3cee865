"""The page /runs/RUN/evaluations/NAME/beside: the same questions before, beside NAME."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from fastapi import FastAPI, Query
from fastapi import Path as InPath
from fastapi.responses import HTMLResponse

from services.likelihood.records import RUN_PATTERN
from services.likelihood.rest.evaluated.answers_page import missing_page
from services.likelihood.rest.evaluated.compared_page import ShownPairs, chooser, compared_page
from services.likelihood.rest.evaluated.folders import (
    answers_in,
    evaluations_of,
    folder_of,
    is_stored,
    own_in,
    trained_in,
)
from services.likelihood.rest.evaluated.kept import protocol_of, training_files
from services.likelihood.rest.evaluated.of_training import name_of, of_training
from services.likelihood.rest.evaluated.pairs import TURNS, Pairs, Side
from services.likelihood.rest.evaluated.shell import page_of
from services.likelihood.rest.paths import Run
from services.likelihood.store.base import LikelihoodStore
from services.likelihood.store.of_folder import FolderStore

MOST_OTHERS = 200
"""Other runs that are offered to be compared with."""


def side_of(store: LikelihoodStore, run: str, name: str) -> Side | None:
    """An evaluation whose answers were kept."""
    folder = folder_of(store, run)
    kept = answers_in(folder, name) if folder else None
    if folder is None or kept is None:
        return None
    own = name in own_in(folder)
    trained = None if own else trained_in(store, run, folder, name)
    label = trained.heading if trained else name
    return Side(run, name, label, trained.about if trained else protocol_of(kept.file), kept, not own)


def named(run: str, before: str) -> tuple[str, str]:
    """Run and name that an address means: NAME of this run, RUN/NAME of another one."""
    other, between, name = before.partition("/")
    return (other, name) if between else (run, before)


def choices(store: LikelihoodStore, run: str, name: str) -> list[tuple[str, str]]:
    """What can stand before an evaluation, the likeliest first, each with words for it: the others of its
    run, then those of the same name of other runs."""
    folder = folder_of(store, run)
    if folder is None:
        return []
    events = evaluations_of(store, run)
    own, trained = own_in(folder), training_files(folder)
    # Same mode first; of these the earliest weights.
    of = {one: of_training(run, None, one, events) for one in trained}
    this = of.get(name)
    steps = {name_of(event): event["step"] for event in events}

    def likely(one: str) -> tuple[bool, bool, int, str]:
        other = of.get(one)
        return (
            (one in own) != (name in own),
            bool(this and other and other.mode != this.mode),
            steps.get(one, 0),
            one,
        )

    names = sorted((one for one in (*own, *trained) if one != name), key=likely)
    found = [(one, heading.heading if (heading := of.get(one)) else one) for one in names]
    if isinstance(store, FolderStore):
        for info in store.runs()[:MOST_OTHERS]:
            other = folder_of(store, info.run) if info.run != run else None
            if other and (name in training_files(other) or (name in own and name in own_in(other))):
                label = of_training(info.run, None, name, evaluations_of(store, info.run))
                found.append((f"{info.run}/{name}", f"{info.run}: {label.heading if label else name}"))
    return found


def chooser_of(store: LikelihoodStore, run: str, name: str) -> str:
    """The form on the page of an evaluation; nothing where there is no other one."""
    found = choices(store, run, name)
    action = f"{page_of(run, name)}/beside"
    return chooser(action, None, found, "Question by question, beside:") if found else ""


def add_beside_route(app: FastAPI, store: LikelihoodStore, headers: Mapping[str, str]) -> None:
    @app.get("/runs/{run}/evaluations/{name}/beside", response_class=HTMLResponse, include_in_schema=False)
    def compared(
        run: Run,
        name: Annotated[str, InPath(max_length=255)],
        before: Annotated[str, Query(max_length=400)],
        show: Annotated[str, Query(pattern=f"^(all|{'|'.join(TURNS)})$")] = "all",
        source: Annotated[str | None, Query(max_length=200)] = None,
        find: Annotated[str, Query(max_length=200)] = "",
        first: Annotated[int, Query(ge=1)] = 1,
    ) -> HTMLResponse:
        places = (named(run, before), (run, name))
        if not re.fullmatch(RUN_PATTERN, places[0][0]):
            return HTMLResponse(missing_page(places[0][0], None), 404, headers=headers)
        sides = [side_of(store, *place) for place in places]
        if None in sides:
            of, wanted = places[sides.index(None)]
            there = is_stored(store, of)
            known = there or folder_of(store, of) is not None
            missing = missing_page(of, wanted if known else None, there=there)
            return HTMLResponse(missing, 404, headers=headers)
        pairs = Pairs(*(side for side in sides if side))
        shown = ShownPairs(before, show, source, find, first)
        page = compared_page(pairs, shown, choices(store, run, name), there=is_stored(store, run))
        return HTMLResponse(page, headers=headers)
