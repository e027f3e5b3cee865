"""Two evaluations of the same questions, paired: which turned right, which turned wrong."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from services.common.shares import paired_interval
from services.likelihood.exports.run_files import flat
from services.likelihood.rest.evaluated.kept import Kept

TURNS = {
    "turned_wrong": "turned wrong",
    "turned_right": "turned right",
    "wrong": "wrong in both",
    "right": "right in both",
}
"""What became of a question, in the order in which a page shows them: what was lost comes first."""
_TURN = {
    (True, False): "turned_wrong",
    (False, True): "turned_right",
    (False, False): "wrong",
    (True, True): "right",
}


@dataclass(frozen=True)
class Side:
    """One of the two evaluations."""

    run: str
    name: str
    label: str
    """Of which weights it is, in words."""
    about: Mapping[str, Any]
    """How it was asked; empty where that was not kept."""
    kept: Kept
    trained: bool
    """Whether the run asked the questions while it trained."""


@dataclass(frozen=True)
class Pair:
    """A question of both: the numbers of its answers, counted from 0, and what became of it."""

    before: int
    after: int
    turn: str
    source: str


@dataclass(frozen=True)
class Pairs:
    """All questions of both; one that stands in a file several times is paired as often."""

    before: Side
    after: Side

    @cached_property
    def all(self) -> list[Pair]:
        waiting: dict[int, list[int]] = defaultdict(list)
        for i, question in enumerate(self.before.kept.questions):
            waiting[question].append(i)
        found = []
        for k, question in enumerate(self.after.kept.questions):
            if not (left := waiting.get(question)):
                continue
            i = left.pop(0)
            (_, first, _), (_, last, source) = self.before.kept.places[i], self.after.kept.places[k]
            found.append(Pair(i, k, _TURN[first, last], source))
        order = {turn: n for n, turn in enumerate(TURNS)}
        return sorted(found, key=lambda pair: order[pair.turn])  # within a turn as the file has them

    def count(self, turn: str) -> int:
        return sum(pair.turn == turn for pair in self.all)

    @property
    def shares(self) -> tuple[float, float]:
        """Exact match before and after, on the questions of both."""
        both = self.count("right")
        n = len(self.all)
        return (both + self.count("turned_wrong")) / n, (both + self.count("turned_right")) / n

    @property
    def interval(self) -> tuple[float, float]:
        """Of the change, 95 %: of these pairs, not of two independent samples."""
        counts = [self.count(turn) for turn in ("right", "turned_wrong", "turned_right", "wrong")]
        return paired_interval(*counts)

    @property
    def alone(self) -> tuple[int, int]:
        """Questions that only the one or only the other has."""
        both = len(self.all)
        return len(self.before.kept.places) - both, len(self.after.kept.places) - both

    def asked_differently(self) -> list[tuple[str, Any, Any]]:
        """Keys of how the two were asked that differ, but for the weights; nothing where one is not known."""
        first, last = (flat(dict(side.about), keep_empty=True) for side in (self.before, self.after))
        if not first or not last or self.before.trained is not self.after.trained:
            return []
        keys = [key for key in {**first, **last} if not key.startswith(("checkpoint", "model"))]
        return [(k, first.get(k), last.get(k)) for k in keys if first.get(k) != last.get(k)]


def command_of(pairs: Pairs) -> str | None:
    """What prints the same in a terminal; None where no command does."""
    before, after = pairs.before, pairs.after
    if before.run == after.run and before.trained and after.trained:
        names = (shlex.quote(name) for name in (after.run, before.name, after.name))
        return f"unspiral trajectories diff {' '.join(names)}"
    if not before.trained and not after.trained:
        return f"unspiral eval compare {_below(before)} {_below(after)}"
    return None


def _below(side: Side) -> str:
    """The file of answers, from the folder above the run's."""
    parts = side.kept.file.parts
    above = max((i for i, part in enumerate(parts) if part == side.run), default=0)
    return shlex.quote("/".join(parts[above:]) if above else str(side.kept.file))
