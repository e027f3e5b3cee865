"""The configuration's section `data`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from services.settings import Settings


class DataSettings(Settings):
    """Question files or folders, of any layout in docs/data.md, or data sets on the hub
    (hf:ORG/NAME/FILE)."""

    train: str
    """Questions to train on."""
    eval: str | None = None
    """Held-out questions."""
    skip_bad: bool = False
    """Leave out malformed rows, counted, instead of stopping at the first."""
    null_is_empty: bool = False
    """Take cells such as NULL, nan, None, N/A or - for empty: such a question or answer makes its row
    malformed."""
    question_key: str | None = None
    """Column of the question, if it has a name of its own; counts in each file that has the column."""
    answer_key: str | None = None
    """Column of the answers likewise; `metadata.answer` is a key in a column."""
    source_key: str | None = None
    """Column of the data source that a question is of, likewise; `weights` and scores by source go by it."""
    id_key: str | None = None
    """Column of the questions' ids, likewise."""
    keep_columns: list[str] | None = None
    """Columns of a row that go along with its question, for code of your own (`question.columns`), up to
    100,000 characters each; `metadata.level` is a key in a column. None: all that the question is not read
    from, of at most 2,000 characters."""
    shuffle: bool = True
    """Shuffle the training questions anew for each pass, seeded."""
    weights: dict[str, Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]] = Field({})
    """How often a pass takes each question of a data source: `{nq: 2, hotpotqa: 0.5}` takes those of nq
    twice, and half of those of hotpotqa, others in each pass. Sources that are not named count 1."""
