"""Whether the answers of questions stand in an index at all: what no search can find, no agent can learn to
find. Counted by data source and by hops, before a GPU hour is spent."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import orjson

from retriever_service.client import clean_query
from retriever_service.search.search_index import SearchIndex
from services.common.counting import counted
from services.common.records import field_of
from services.contracts import Question
from trainer.rewards import normalize

BATCH = 256
MISSES = 10
"""Questions without their answer that are kept to be read."""
_HOPS = re.compile(r"([1-9])_?-?hops?", re.IGNORECASE)
_WORDS = frozenset({"yes", "no", "true", "false"})
"""Answers that stand in no passage, and in any."""


@dataclass
class Found:
    """Questions of one kind, and those of which an answer stands in the passages found."""

    asked: int = 0
    found: int = 0
    verdicts: int = 0
    """Questions whose answer is yes or no, which no passage shows; they are in neither number."""


@dataclass(frozen=True)
class Miss:
    """A question whose answers stand in none of its passages."""

    question: Question
    best: str
    """The title, or the beginning, of the best passage; empty where nothing was found."""


@dataclass
class Coverage:
    """The findings."""

    topk: int
    by_source: dict[str, Found] = field(default_factory=dict)
    by_hops: dict[str, Found] = field(default_factory=dict)
    """Empty where no row says how many hops its question has."""
    places: Counter[int] = field(default_factory=Counter)
    """Questions by the place, from 1, of the first passage that holds an answer."""
    misses: list[Miss] = field(default_factory=list)

    def total(self) -> Found:
        """Of all sources."""
        every = self.by_source.values()
        return Found(
            sum(one.asked for one in every),
            sum(one.found for one in every),
            sum(one.verdicts for one in every),
        )


def hops_of(row: Mapping[str, Any]) -> str | None:
    """How many hops a row says that its question has, or its kind (HotpotQA's `bridge`); None where it does
    not say."""
    inside = row.get("metadata")
    for place in (row, inside if isinstance(inside, Mapping) else {}):
        if given := field_of(place, ["hops", "num_hops", "n_hops", "hop"]):
            return f"{given[1]} hops"
        if isinstance(steps := place.get("question_decomposition"), list):
            return f"{len(steps)} hops"
        if isinstance(kind := place.get("type"), str):
            return kind
    named = _HOPS.search(str(row.get("id", "")))
    return f"{named[1]} hops" if named else None


def holds(contents: str, answers: Iterable[str]) -> bool:
    """Whether one of the answers stands in a passage, both normalised as in exact match, word by word."""
    text = f" {normalize(contents)} "
    return any(f" {plain} " in text for answer in answers if (plain := normalize(answer)))


def coverage(
    rows: Iterable[tuple[Question, str | None]],
    index: SearchIndex,
    topk: int,
    on_batch: Callable[[int, list[tuple[Question, list[dict[str, Any]]]]], None] = lambda done, found: None,
) -> Coverage:
    """Search each question by its own text, and look for its answers in the best `topk` passages.

    rows: questions, each with its hops. on_batch: told how many questions are done, and the last ones with
    their passages.
    """
    result = Coverage(topk)
    done = 0
    for batch in _batches(rows):
        hits = index.search([clean_query(question.text) for question, _ in batch], topk)
        found = [[orjson.loads(document) for document, _ in one] for one in hits]
        for (question, hops), passages in zip(batch, found, strict=True):
            _count(result, question, hops, passages)
        done += len(batch)
        questions = (question for question, _ in batch)
        on_batch(done, list(zip(questions, found, strict=True)))
    return result


def _batches(rows: Iterable[tuple[Question, str | None]]) -> Iterator[list[tuple[Question, str | None]]]:
    left = iter(rows)
    while batch := list(islice(left, BATCH)):
        yield batch


def _count(result: Coverage, question: Question, hops: str | None, passages: list[dict[str, Any]]) -> None:
    kinds = [result.by_source.setdefault(question.data_source, Found())]
    if hops is not None:
        kinds.append(result.by_hops.setdefault(hops, Found()))
    if all(normalize(answer) in _WORDS for answer in question.golden_answers):
        for kind in kinds:
            kind.verdicts += 1
        return
    held = (n for n, one in enumerate(passages, 1) if holds(one["contents"], question.golden_answers))
    place = next(held, None)
    for kind in kinds:
        kind.asked += 1
        kind.found += place is not None
    if place is not None:
        result.places[place] += 1
    elif len(result.misses) < MISSES:
        result.misses.append(Miss(question, passages[0]["contents"].partition("\n")[0] if passages else ""))


def lines(result: Coverage, index: str) -> Iterator[str]:
    """The findings in words: the share by source and by hops, the places, and misses to read."""
    total = result.total()
    yield (
        f"an answer stands in the best {result.topk} passages of {index} for {total.found:,} of "
        f"{total.asked:,} questions" + (f" ({total.found / total.asked:.1%})" if total.asked else "")
    )
    if total.verdicts:
        many = counted(total.verdicts, "question is", "questions are")
        yield f"  {many} answered by yes or no, which no passage shows"
    kinds = [*sorted(result.by_source.items()), *sorted(result.by_hops.items())]
    width = max((len(name) for name, _ in kinds), default=0)
    for name, one in kinds:
        if one.asked:
            yield f"  {name:{width}}  {one.found:,} of {one.asked:,} ({one.found / one.asked:.1%})"
    if result.places:
        places = ", ".join(f"{result.places[n]:,} at place {n}" for n in sorted(result.places))
        yield f"  the first such passage: {places}"
    if result.misses:
        yield "  missed, for example:"
    for miss in result.misses:
        answers = " | ".join(miss.question.golden_answers[:3])
        yield f"    {miss.question.text} -> {answers}  (best: {miss.best or 'nothing'})"
