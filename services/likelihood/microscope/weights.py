"""How much each trajectory weighs in an alarm: which groups are kept, and where an alarm's link leads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from services.likelihood.microscope.heads import Place, SampleHead


class Columns(Protocol):
    """Numbers of B trajectories, each float64 [B]; NaN where one is not known."""

    @property
    def advantage(self) -> np.ndarray: ...

    @property
    def reward(self) -> np.ndarray: ...

    @property
    def change(self) -> np.ndarray:
        """Mean change of the log-prob per token, in nats."""

    @property
    def tokens(self) -> np.ndarray:
        """That the model wrote."""

    @property
    def searches(self) -> np.ndarray: ...

    @property
    def wasted(self) -> np.ndarray:
        """Searches that brought nothing, or nothing new."""

    @property
    def invalid(self) -> np.ndarray:
        """1 where an action neither searched nor answered."""

    @property
    def unanswered(self) -> np.ndarray:
        """1 where it ended without an answer."""

    @property
    def truncated(self) -> np.ndarray:
        """1 where it ended at the limit of tokens."""

    @property
    def mismatch(self) -> np.ndarray:
        """Largest difference of a token's log-prob between sampler and learner, in nats."""


Weight = Callable[[Columns], np.ndarray]


def fall(of: Columns) -> np.ndarray:
    """What the monitor's likelihood rules are about: likelihood that an answer lost although its advantage is
    not below 0. Others count for a thousandth of theirs, so that they come last. float64 [B]."""
    lost = np.nan_to_num(-of.change)
    return np.where(of.advantage >= 0, lost, lost / 1000)


def _mismatch(of: Columns) -> np.ndarray:
    return of.mismatch


WEIGHTS: dict[str, Weight] = {
    "collapse": lambda of: -of.reward,
    "dead_batch": lambda of: -of.reward,
    "degenerate_groups": lambda of: -of.reward,
    "interaction": lambda of: of.searches,
    "leak": _mismatch,
    "length": lambda of: of.tokens,
    "mismatch": _mismatch,
    "no_reward": lambda of: np.isnan(of.reward).astype(float),
    "retrieval": lambda of: of.wasted,
    "truncation": lambda of: of.truncated * (1 + of.tokens),
    "validity": lambda of: 2 * of.invalid + of.unanswered,
}
"""By the rule of the alarm. All other rules speak of likelihood, and weigh what was lost of it."""


def weights_of(of: Columns, rule: str | None) -> np.ndarray:
    """How much each trajectory weighs in an alarm of a rule (None: of likelihood), float64 [B]. What is not
    known weighs least."""
    return np.nan_to_num(WEIGHTS.get(rule or "", fall)(of), nan=-np.inf)


class HeadColumns:
    """The columns of heads."""

    def __init__(self, heads: Sequence[SampleHead]) -> None:
        self.heads = heads

    def _of(self, read: Callable[[SampleHead], float | None]) -> np.ndarray:
        values = (read(head) for head in self.heads)
        return np.asarray([np.nan if value is None else value for value in values], np.float64)

    @cached_property
    def advantage(self) -> np.ndarray:
        return self._of(lambda head: head.advantage)

    @cached_property
    def reward(self) -> np.ndarray:
        return self._of(lambda head: head.reward)

    @cached_property
    def change(self) -> np.ndarray:
        return self._of(lambda head: head.change)

    @cached_property
    def tokens(self) -> np.ndarray:
        return self._of(lambda head: head.tokens)

    @cached_property
    def searches(self) -> np.ndarray:
        return self._of(lambda head: head.searches)

    @cached_property
    def wasted(self) -> np.ndarray:
        return self._of(lambda head: head.wasted)

    @cached_property
    def invalid(self) -> np.ndarray:
        return self._of(lambda head: head.valid is False)

    @cached_property
    def unanswered(self) -> np.ndarray:
        return self._of(lambda head: head.finish not in (None, "answer"))

    @cached_property
    def truncated(self) -> np.ndarray:
        return self._of(lambda head: head.finish == "length")

    @cached_property
    def mismatch(self) -> np.ndarray:
        return self._of(lambda head: abs(head.mismatch.nats) if head.mismatch else None)


def heaviest(heads: Sequence[SampleHead], rule: str | None) -> SampleHead | None:
    """The trajectory that weighs most; of equal ones that which lost most likelihood, then the first."""
    if not heads:
        return None
    columns = HeadColumns(heads)
    return heads[int(np.lexsort((-fall(columns), -weights_of(columns, rule)))[0])]


def place_of(head: SampleHead, rule: str | None) -> Place | None:
    """The token of a trajectory that weighs most in an alarm."""
    return head.mismatch if WEIGHTS.get(rule or "") is _mismatch else head.lowest
