"""Names that a run may have: each is a folder's, and a word of the command line."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from services.common.runs.paths import BEST, LATEST


def _means_a_run(name: str) -> str:
    if name in (LATEST, BEST):
        meant = {LATEST: "the newest run", BEST: "a run's best checkpoint"}[name]
        raise ValueError(f"`{name}` means {meant} on the command line; choose another name")
    return name


RunName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128), AfterValidator(_means_a_run)
]
