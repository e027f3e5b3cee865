"""An index that is a function of the user's own: `--index package.module:function`, or `retriever.index`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from retriever_service.index_folder.description import IndexInfo
from retriever_service.index_folder.documents import encode_document
from retriever_service.index_folder.rows import Rows
from retriever_service.ranking import Reranker
from retriever_service.search.search_index import Hits
from services.common.answers import clean_text
from services.common.errors import UserError
from services.common.loading.user_code import Call, calling, load
from services.common.printing.kinds import kind_of

TRIAL = "who wrote Hamlet?"
"""The query of the one call when an index is opened."""


class Search(Protocol):
    """What the import path names."""

    def __call__(self, query: str, topk: int) -> Sequence[tuple[str, float]]:
        """At most `topk` passages of a query, best first: `title, newline, text`, and the score."""


def load_search(key: str, path: str) -> Search:
    """The function at an import path. key: the one that names it, for the error. Raises UserError."""
    return load(key, path, "a function of a query and topk", Call(2))


EXPECTED = "a list of passages with their scores, best first, such as [('title\\ntext', 1.5)]"


def call_search(where: str, search: Search, query: str, topk: int) -> list[tuple[str, float]]:
    """The passages that it returns. where: of the error. Raises UserError where it fails, or returns another
    form."""
    with calling(where):
        returned: Any = search(query, topk)
        found = list(returned) if isinstance(returned, Iterable) and not isinstance(returned, str) else None
    if found is None:
        raise UserError(f"{where}: expected {EXPECTED}; it returned {kind_of(returned)}")
    return [_hit(where, at, one) for at, one in enumerate(found)]


def _hit(where: str, at: int, one: Any) -> tuple[str, float]:
    """A passage and its score. Raises UserError where it is none."""
    is_pair = isinstance(one, list | tuple) and len(one) == 2
    if not is_pair or not isinstance(one[0], str) or isinstance(one[1], bool | str | list | tuple | None):
        got = (
            f"{kind_of(one)} of {', '.join(map(kind_of, one))}"
            if isinstance(one, list | tuple)
            else kind_of(one)
        )
        raise UserError(f"{where}: expected {EXPECTED}; its passage {at} is {got}")
    with calling(where):
        text, score = clean_text(one[0]), float(one[1])
    if not math.isfinite(score):  # it orders nothing, and JSON has no number for it
        raise UserError(f"{where}: its passage {at} has the score {score}; expected a finite number")
    return text, score


class UsersIndex:
    """A SearchIndex over such a function. A passage's id is a digest of its text."""

    quick = False
    rows: Rows | None = None

    def __init__(self, path: str, reranker: Reranker | None) -> None:
        if reranker is not None:
            raise UserError(f"--reranker: does not go with --index {path}, which ranks by itself")
        self.reranker: Reranker | None = None
        self._path = path
        self._function = load_search("index", path)
        self._refuse_other_forms()
        self.info = IndexInfo(backend="function", corpus=path, passages=0, settings={})

    def _refuse_other_forms(self) -> None:
        """One call, before anybody asks. Raises UserError for another form of answer; a function that fails
        may be early: what it asks is not up yet."""
        try:
            call_search(f"index {self._path}", self._function, TRIAL, 1)
        except UserError as error:
            if error.__cause__ is None:
                raise

    def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        """As SearchIndex. Raises UserError where the function fails: never an empty result instead."""
        return [self._one(query, topk) if query.strip() else [] for query in queries]

    def _one(self, query: str, topk: int) -> Hits:
        found = call_search(f"index {self._path}", self._function, query, topk)
        return [(encode_document(_id(contents), contents, None), score) for contents, score in found[:topk]]

    def normalise(self, query: str) -> str:
        """The query itself."""
        return query

    def close(self) -> None:
        """Nothing is held open."""


def _id(contents: str) -> str:
    return hashlib.blake2b(contents.encode(), digest_size=8).hexdigest()
