"""What goes between a shard and the server before it. No interface for other clients.

`GET /shard` says what the shard holds. `POST /shard/frequencies` counts terms, and `POST /shard/search`
searches by statistics that the server before all shards has added up. Both name the version of the index that
they mean, and get a 409 from another one.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

ABOUT = "/shard"
FREQUENCIES = "/shard/frequencies"
SEARCH = "/shard/search"
OTHER_VERSION = 409


class _Message(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True, extra="ignore")


class Numbers(_Message):
    """Ids of a shard's passages that are different whole numbers."""

    first: int
    last: int
    count: int
    """How many, at least."""


class About(_Message):
    """The index of a shard."""

    version: str
    """As `retriever_service.index_folder.description.version_of`."""
    backend: str
    passages: int
    tokens: int | None = None
    """Sum of the lengths of its passages in terms; null where it takes no statistics of others."""
    settings: dict[str, Any]
    """What must be the same on all shards, for their scores to be of one scale."""
    numbers: Numbers | None = None
    """The ids that are ascending whole numbers, as of rows without ids; null where it knows of none."""


class Whole(_Message):
    """`retriever_service.ranking.Statistics` of all shards."""

    passages: int = Field(ge=1)
    tokens: int = Field(ge=0)
    frequencies: dict[str, NonNegativeInt]


class FrequenciesAsked(_Message):
    """Terms, as the analyzer makes them, to be counted."""

    version: str
    terms: list[str]


class SearchAsked(_Message):
    """Queries to be searched; without `whole` by the shard's own statistics."""

    version: str
    queries: list[str]
    topk: int
    whole: Whole | None = None
