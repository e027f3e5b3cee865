"""The held-out scores that `trainer.best_by` may name."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from services.common.names import accepted

MACRO = "em_macro"
"""The mean of the data sources' exact match, each counting the same."""
_OF_SOURCE = "em/"
SCORES = ("em", "f1", "right", MACRO)
"""Those of all questions; `em/SOURCE` is that of one data source."""


def source_in(by: str) -> str | None:
    """The data source that `em/SOURCE` names; None of another score."""
    return by.removeprefix(_OF_SOURCE) or None if by.startswith(_OF_SOURCE) else None


def _checked(by: str) -> str:
    """The same; raises ValueError where it names no score."""
    if by not in SCORES and source_in(by) is None:
        raise ValueError(f"{by}: {accepted(by, (*SCORES, f'{_OF_SOURCE}SOURCE'))}")
    return by


BestBy = Annotated[str, AfterValidator(_checked)]
