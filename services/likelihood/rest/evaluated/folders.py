"""Where the evaluations of a run lie, and which there are."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.likelihood.evaluations import MOST_EVENTS
from services.likelihood.records import RUN_PATTERN
from services.likelihood.rest.evaluated.kept import Kept, kept_in, own_files, training_files
from services.likelihood.rest.evaluated.of_training import OfTraining, of_training
from services.likelihood.store.base import EVALUATION, LikelihoodStore, NotStored
from services.likelihood.store.of_folder import FolderStore
from services.likelihood.store.sqlite.store import SQLiteStore

PAGE = "table.html"


def folder_of(store: LikelihoodStore, run: str) -> Path | None:
    """The run's folder, in which its store lies; None where it lies elsewhere, or is no file."""
    if isinstance(store, FolderStore):
        return store.run_folder(run) or untrained(store, store.folder / run)
    if isinstance(store, SQLiteStore) and store.path.absolute().parent.name == run:
        return store.path.absolute().parent
    return None


def untrained(store: FolderStore, folder: Path) -> Path | None:
    """A folder beside the runs in which nothing was trained, and `unspiral eval` left answers; None for
    another one."""
    is_one = (
        (folder / "eval").exists()
        and store.run_folder(folder.name) is None
        and re.fullmatch(RUN_PATTERN, folder.name)
        and own_files(folder)
    )
    return folder if is_one else None


def untrained_in(store: LikelihoodStore) -> list[str]:
    """Names of these in a folder of runs."""
    if not isinstance(store, FolderStore):
        return []
    beside = (file.parent for file in sorted(store.folder.glob("*/eval")))
    return [folder.name for folder in beside if untrained(store, folder)]


def suites_in(folder: Path) -> dict[str, Path]:
    """The page of each suite's evaluation in a run's folder, by name."""
    return {file.parent.name: file for file in sorted((folder / "eval").glob(f"*/{PAGE}"))}


def own_in(folder: Path) -> dict[str, Path]:
    """The answers to other questions, by a name that no suite has."""
    suites = suites_in(folder)
    return {name: file for name, file in own_files(folder).items() if name not in suites}


def answers_in(folder: Path, name: str) -> Kept | None:
    """Those of `unspiral eval`, or of training."""
    file = own_in(folder).get(name) or training_files(folder).get(name)
    return kept_in(file) if file else None


def evaluations_of(store: LikelihoodStore, run: str) -> list[dict[str, Any]]:
    """What its training posted, oldest first; nothing of a run that has posted nothing yet."""
    with suppress(NotStored):
        return store.events(run, MOST_EVENTS, EVALUATION)
    return []


def trained_in(store: LikelihoodStore, run: str, folder: Path, name: str) -> OfTraining | None:
    """What is known of an evaluation that the run made while it trained; None of another one."""
    return None if name in own_in(folder) else of_training(run, folder, name, evaluations_of(store, run))


def is_stored(store: LikelihoodStore, run: str) -> bool:
    """Whether it has a page: a folder in which nothing was trained has none."""
    try:
        store.info(run)
    except NotStored:
        return False
    return True
