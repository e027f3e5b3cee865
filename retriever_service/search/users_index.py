"""An index that is a function of the user's own: `--index package.module:function`, or `retriever.index`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Protocol

from retriever_service.index_folder.description import IndexInfo
from retriever_service.index_folder.documents import encode_document
from retriever_service.index_folder.rows import Rows
from retriever_service.ranking import Reranker
from retriever_service.search.search_index import Hits
from services.common.answers import clean_text
from services.common.errors import UserError
from services.common.loading.user_code import Call, calling, load
from services.common.printing.kinds import returned_kind
from services.common.processes.daemon_threads import DaemonThreads
from services.common.processes.own_loop import result_of

TRIAL = "who wrote Hamlet?"
"""The query of the one call when an index is opened."""
MOST_HANGING = 64
"""Calls that may hang in threads of their own before further ones wait for them."""


class Search(Protocol):
    """What the import path names."""

    def __call__(
        self, query: str, topk: int
    ) -> Sequence[tuple[str, float]] | Awaitable[Sequence[tuple[str, float]]]:
        """At most `topk` passages of a query, best first: `title, newline, text`, and the score. It may be
        `async`."""


def load_search(key: str, path: str) -> Search:
    """The function at an import path. key: the one that names it, for the error. Raises UserError."""
    return load(key, path, "a function of a query and topk", Call(2, awaited=True))


EXPECTED = "a list of passages with their scores, best first, such as [('title\\ntext', 1.5)]"


def call_search(where: str, search: Search, query: str, topk: int) -> list[tuple[str, float]]:
    """The passages that it returns. where: of the error. Raises UserError where it fails, or returns another
    form."""
    with calling(where):
        returned = result_of(search, query, topk)
        found = list(returned) if isinstance(returned, Iterable) and not isinstance(returned, str) else None
    if found is None:
        raise UserError(f"{where}: expected {EXPECTED}; it returned {returned_kind(returned)}")
    return [_hit(where, at, one) for at, one in enumerate(found)]


def _hit(where: str, at: int, one: Any) -> tuple[str, float]:
    """A passage and its score. Raises UserError where it is none."""
    is_pair = isinstance(one, list | tuple) and len(one) == 2
    if not is_pair or not isinstance(one[0], str) or isinstance(one[1], bool | str | list | tuple | None):
        of = ""
        if isinstance(one, list | tuple):
            of = f" of {', '.join(map(returned_kind, one))}" if one else " of nothing"
        raise UserError(f"{where}: expected {EXPECTED}; its passage {at} is {returned_kind(one)}{of}")
    with calling(where):
        text, score = clean_text(one[0]), float(one[1])
    if not math.isfinite(score):  # it orders nothing, and JSON has no number for it
        raise UserError(f"{where}: its passage {at} has the score {score}; expected a finite number")
    return text, score


class UsersIndex:
    """A SearchIndex over such a function. A passage's id is a digest of its text."""

    quick = False
    rows: Rows | None = None

    def __init__(
        self,
        path: str,
        reranker: Reranker | None = None,
        *,
        concurrency: int = 1,
        timeout_seconds: float = 30.0,
    ) -> None:
        """concurrency: most calls at a time, each in a thread. With 1 all are made in the same one, so that
        the function need not be made for several. timeout_seconds: longest wait for a call."""
        if reranker is not None:
            raise UserError(f"--reranker: does not go with --index {path}, which ranks by itself")
        self.reranker: Reranker | None = None
        self.at_once = concurrency
        """Most calls at a time."""
        self.seconds = timeout_seconds
        """Longest wait for one."""
        self._path = path
        self._threads = DaemonThreads(concurrency, "search")
        self._function = load_search("index", path)
        self.failure: UserError | None = None
        """Of the last call, until one is answered."""
        self._refuse_other_forms()
        self.info = IndexInfo(backend="function", corpus=path, passages=0, settings={})

    def _refuse_other_forms(self) -> None:
        """One call, before anybody asks. Raises UserError for another form of answer; a function that fails
        may be early: what it asks is not up yet."""
        (outcome,) = self._outcomes([TRIAL], 1)
        if isinstance(outcome, UserError) and outcome.__cause__ is None:
            raise outcome

    def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        """As SearchIndex. Raises UserError where the function fails: never an empty result instead."""
        outcomes = self._outcomes(queries, topk)
        if (error := next((one for one in outcomes if isinstance(one, Exception)), None)) is not None:
            raise error
        return outcomes

    def _outcomes(self, queries: Sequence[str], topk: int) -> list[Any]:
        """Of each query the passages, or the UserError."""
        calls = [self.begin(query, topk) if query.strip() else None for query in queries]
        # After the first call that is late the others are not waited for.
        seconds = self.seconds
        outcomes: list[Any] = []
        for call in calls:
            if call is not None and not wait([call], seconds).done:
                seconds = 0.0
                outcomes.append(self.give_up(call)[0])
            else:
                outcomes.append([] if call is None else call.exception() or call.result())
        return outcomes

    def begin(self, query: str, topk: int) -> Future[Hits]:
        """Call the function in a thread, once one is free."""
        return self._threads.submit(partial(self._one, query, topk))

    def give_up(self, call: Future[Hits]) -> tuple[UserError, bool]:
        """The error of a call that is late, and whether another thread takes the place of its own: Python
        cannot end one, and it may wait for ever for what its function asks."""
        began = self._threads.give_up(call)
        replaced = not began or self._threads.hanging <= MOST_HANGING
        if began and replaced:
            self._threads.most += 1
        late = UserError(f"index {self._path}: no result within {self.seconds:g} s")
        late.__cause__ = TimeoutError()  # no fault of the form of what it returns
        return late, replaced

    def _one(self, query: str, topk: int) -> Hits:
        try:
            found = call_search(f"index {self._path}", self._function, query, topk)
        except UserError as error:
            self.failure = error
            raise
        self.failure = None
        return [(encode_document(_id(contents), contents, None), score) for contents, score in found[:topk]]

    @property
    def failing(self) -> str:
        """The kind of the last call's error, for those who ask for the state without a token; "" where it was
        answered."""
        if self.failure is None:
            return ""
        cause = self.failure.__cause__
        return f"the last call of the function failed: {type(cause).__name__ if cause else 'another form'}"

    def normalise(self, query: str) -> str:
        """The query itself."""
        return query

    def close(self) -> None:
        """End the threads, once their calls have returned."""
        self._threads.close()


def _id(contents: str) -> str:
    return hashlib.blake2b(contents.encode(), digest_size=8).hexdigest()
