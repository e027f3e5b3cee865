"""Reading the answer of a retriever for the one thing that counts: `document.contents`, as Search-R1's own
clients do.

Ids and scores may be missing. Servers that search the web send none, and some send documents that stand bare
in the list.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

from services.common.answers import clean_text, read_json, shown
from services.common.printing.kinds import kind_of

MOST_CHARS = 1_000_000
"""Longest passage, in characters; the rest is cut off. No observation shows so many."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One passage that was found. A higher score is better."""

    id: str
    """A passage without an id gets one that is made from its text, so that the same passage has the same
    id."""
    contents: str
    score: float | None
    """None where the server gave no number."""


@dataclass(frozen=True)
class Answer:
    """An answer, taken apart. `lists[i]` is None where query i must be asked again, and `fault` says why."""

    lists: list[list[Hit] | None]
    fault: str | None = None
    left_out: int = 0
    """Hits without text beside others of the same query that have some."""


def read_answer(body: bytes, charset: str | None, count: int) -> Answer:
    """The answer to `count` queries. Never raises: what cannot be read is a fault, and all queries are to be
    asked again."""
    nothing: list[list[Hit] | None] = [None] * count
    try:
        answer = read_json(body, charset)
    except ValueError as error:
        return Answer(nothing, str(error))
    lists = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(lists, list):
        return Answer(nothing, f"no list under `result`: {shown(body)}")
    if len(lists) != count:
        return Answer(nothing, f"{len(lists)} lists for {count} queries")
    fault = None
    left_out = 0
    read = []
    for at, one in enumerate(lists):
        hits, problem, bad = _hits(one, f"result[{at}]")
        read.append(hits)
        left_out += bad
        fault = fault or (problem if hits is None else None)
    return Answer(read, fault, left_out)


def _hits(one: Any, where: str) -> tuple[list[Hit] | None, str | None, int]:
    """The hits of one query, what is wrong with the first that has no text, and how many of those were left
    out."""
    if not isinstance(one, list):
        return None, f"{where}: expected a list of passages, got {kind_of(one)}", 0
    hits = []
    problem = None
    for at, raw in enumerate(one):
        hit = _hit(raw)
        if hit is None:
            problem = problem or f"{where}[{at}]: no text under document.contents"
        else:
            hits.append(hit)
    if one and not hits:
        return None, problem, 0
    return hits, problem, len(one) - len(hits)


def _hit(raw: Any) -> Hit | None:
    if not isinstance(raw, dict):
        return None
    document = raw.get("document", raw)
    contents = document.get("contents") if isinstance(document, dict) else None
    if not isinstance(contents, str):
        return None
    contents = clean_text(contents[:MOST_CHARS])
    return Hit(_id(document.get("id"), contents), contents, _score(raw.get("score")))


def _id(value: Any, contents: str) -> str:
    if isinstance(value, str | int | float) and not isinstance(value, bool) and value == value:
        return clean_text(str(value))
    digest = hashlib.blake2b(contents.encode("utf-8", "replace"), digest_size=8).hexdigest()
    return f"text:{digest}"


def _score(value: Any) -> float | None:
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return score if math.isfinite(score) else None
