"""Questions of one file that stand in another too, word for word or nearly: a held-out set that was trained
on measures memory.

Near is a Jaccard similarity of at least NEAR between two questions' sets of words, found exactly and without
comparing all pairs: two such sets share one of their rarest words (prefix filtering; Chaudhuri, Ganti and
Kaushik, ICDE 2006).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.common.errors import UserError
from services.contracts import Question
from trainer.data.columns import Keys
from trainer.data.questions import NO_KEYS, BadRow, parsed
from trainer.rewards import normalize

NEAR = 0.8
"""One word of ten that is another one gives 9 / 11, about .82."""


@dataclass(frozen=True)
class Twin:
    """A question, and its nearest one in the other file."""

    question: Question
    other: Question
    similarity: float
    """1 where both are the same once normalised."""
    answers_agree: bool
    """They have a golden answer in common."""
    place: str
    """File and line of the question."""
    other_place: str


@dataclass
class Against:
    """What was read of the other file."""

    rows: int = 0
    unread: list[BadRow] = field(default_factory=list)
    """Its malformed rows, with which nothing is compared."""


def twins(
    path: str | Path, against: str | Path, read: Against | None = None, keys: Keys = NO_KEYS
) -> list[Twin]:
    """The good rows of `path` that have an equal or near question in `against`, in their order. Raises
    UserError where a file cannot be read, and where no row of `against` can be compared.

    read: takes what was read of `against`. keys: columns that the user has named; each file is read by those
    of them that it has.
    """
    read = Against() if read is None else read
    places, ours = _questions(Path(path), [], keys.beside(path, against))
    other_places, others = _questions(Path(against), read.unread, keys.of_file(against))
    read.rows = len(others) + len(read.unread)
    if read.unread and not others:
        raise UserError(
            f"{against}: none of its {read.rows:,} rows could be compared, the first: {read.unread[0]}"
        )
    words = [[frozenset(normalize(q.text).split()) for q in side] for side in (ours, others)]
    counts = Counter(word for side in words for one in side for word in one)
    exact: dict[str, int] = {}
    for at, question in enumerate(others):
        exact.setdefault(normalize(question.text), at)
    by_word: dict[str, list[int]] = defaultdict(list)
    for at, one in enumerate(words[1]):
        for word in _rarest(one, counts):
            by_word[word].append(at)
    found = []
    for place, question, mine in zip(places, ours, words[0], strict=True):
        same = exact.get(normalize(question.text))
        nearest = (1.0, same) if same is not None else _nearest(mine, by_word, words[1], counts)
        if nearest is not None:
            similarity, at = nearest
            agree = _agree(question, others[at])
            found.append(Twin(question, others[at], similarity, agree, place, other_places[at]))
    return found


def repeated(ours: Sequence[Question], others: Sequence[Question]) -> int:
    """Those of `ours` that are a question of `others` once normalised, with a golden answer in common: equal
    words alone may ask about two worlds, as those of the demo's laboratory do."""
    wanted = {normalize(question.text) for question in ours}
    there: dict[str, list[Question]] = defaultdict(list)
    for question in others:
        if (text := normalize(question.text)) in wanted:
            there[text].append(question)
    return sum(any(_agree(one, other) for other in there.get(normalize(one.text), ())) for one in ours)


def _questions(path: Path, unread: list[BadRow], keys: Keys) -> tuple[list[str], list[Question]]:
    """Places and questions of the good rows."""
    places = []
    questions = []
    for item in parsed(path, keys=keys):
        if isinstance(item, BadRow):
            unread.append(item)
            continue
        places.append(item[0].place)
        questions.append(item[1].question)
    return places, questions


def _rarest(words: frozenset[str], counts: Counter[str]) -> list[str]:
    """So many of the rarest words that a near set must share one of them."""
    order = sorted(words, key=lambda word: (counts[word], word))
    return order[: len(words) - math.ceil(NEAR * len(words)) + 1]


def _nearest(
    mine: frozenset[str],
    by_word: dict[str, list[int]],
    others: Sequence[frozenset[str]],
    counts: Counter[str],
) -> tuple[float, int] | None:
    candidates = {at for word in _rarest(mine, counts) for at in by_word.get(word, ())}
    best: tuple[float, int] | None = None
    for at in sorted(candidates):
        theirs = others[at]
        if min(len(mine), len(theirs)) < NEAR * max(len(mine), len(theirs)):
            continue
        similarity = len(mine & theirs) / len(mine | theirs)
        # Equal words in another order are near, and not the same question.
        similarity = min(similarity, 0.999)
        if similarity >= NEAR and (best is None or similarity > best[0]):
            best = (similarity, at)
    return best


def _agree(a: Question, b: Question) -> bool:
    return bool({*map(normalize, a.golden_answers)} & {*map(normalize, b.golden_answers)})
