"""Rewards. A reward reads only the text that the model itself wrote, never the prompt or a retrieved
document."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from numbers import Real
from typing import Any

from services.common.errors import UserError
from services.common.loading.user_code import Call, calling, check_takes, find, with_colon
from services.common.loading.what_it_has import defined_at
from services.common.names import near_name
from services.common.printing.kinds import returned_kind
from services.common.processes.own_loop import result_of
from services.contracts import Trajectory
from services.likelihood.metrics.verdicts import BEST_REWARD
from trainer.rewards.answers import (
    exact_match,
    final_answer,
    normalize,
    search_r1_match,
    strict_match,
    substring_match,
    token_f1,
    unscorable,
)
from trainer.rewards.shaped import format_reward
from trainer.rewards.spans import answer_mask

__all__ = [
    "ACCEPTED",
    "Reward",
    "answer_mask",
    "final_answer",
    "is_kind",
    "make_reward",
    "normalize",
    "unscorable",
    "right_at",
]

Reward = Callable[[Trajectory], float | None]
"""Score of a finished trajectory. None or a non-finite number leaves the trajectory out of its group's
statistics and of every loss.

A function whose right answers do not earn BEST_REWARD says what they earn by an attribute `right_at`, a
number.
"""


def em(trajectory: Trajectory) -> float:
    """1 where the answer equals a golden answer after normalisation, otherwise 0, also without an answer."""
    return _of_answer(trajectory, exact_match)


def f1(trajectory: Trajectory) -> float:
    """Token F1 of the answer with the nearest golden answer, 0 to 1; no complete answer is 0."""
    return _of_answer(trajectory, token_f1)


def subem(trajectory: Trajectory) -> float:
    """1 where the answer holds a golden answer after normalisation, otherwise 0, also without an answer."""
    return _of_answer(trajectory, substring_match)


def em_strict(trajectory: Trajectory) -> float:
    """As `em`, with numbers, signs and symbols kept and Unicode folded: `1.5` is not `15`, and a curly quote
    is a straight one."""
    return _of_answer(trajectory, strict_match)


def em_search_r1(trajectory: Trajectory) -> float:
    """Search-R1's own exact match and reading of the tags, for parity: an empty answer equals a golden answer
    like `A`."""
    answer = final_answer(trajectory, "search_r1")
    return 0.0 if answer is None else search_r1_match(answer, trajectory.question.golden_answers)


_KNOWN: dict[str, Reward] = {
    "em": em,
    "f1": f1,
    "subem": subem,
    "format": format_reward,
    "em_strict": em_strict,
    "em_search_r1": em_search_r1,
}


KINDS = tuple(_KNOWN)
ACCEPTED = f"accepted are {', '.join(_KNOWN)}, or an import path package.module:function"


def is_kind(kind: str) -> bool:
    """Whether it names a reward, or could be the import path of one."""
    return kind in _KNOWN or re.fullmatch(r"[\w.]+:[\w.]+", kind) is not None


def make_reward(kind: str) -> Reward:
    """The reward of `reward.kind`: a known one (docs/algorithms.md, "Scoring"), or the function at an import
    path `package.module:function`.

    The path is looked for where Python looks, and in the current folder. Of a function that is `async` each
    call waits for the result. Raises UserError; so does a user's function where it fails or returns what is
    neither a number nor None.
    """
    if kind in _KNOWN:
        return _KNOWN[kind]
    if not is_kind(kind):
        raise UserError(f"reward.kind {kind!r}: {ACCEPTED}{near_name(kind, _KNOWN) or with_colon(kind)}")
    with calling(f"reward.kind {kind!r}: cannot be imported"):
        found = find(kind)
    if not callable(found):
        raise UserError(
            f"reward.kind {kind!r}: expected a function of one trajectory, found {type(found).__name__}"
        )
    check_takes(f"reward.kind {kind!r}", "a function of one trajectory", found, Call(1, awaited=True))
    return _UsersReward(kind, found)


class _UsersReward:
    """A user's function, of which each result is checked."""

    def __init__(self, kind: str, function: Callable[[Trajectory], Any]) -> None:
        # Copies the attribute `right_at` where the function has one. Where it has none, none is made up:
        # `BatchSampler` asks whether the function says it.
        functools.update_wrapper(self, function)
        self.kind = kind
        self.function = function

    def __call__(self, trajectory: Trajectory) -> float | None:
        with calling(f"reward.kind {self.kind!r}: on trajectory {trajectory.uid}"):
            returned = result_of(self.function, trajectory)
            try:
                return _as_reward(returned)
            except TypeError as error:
                raise TypeError(f"{error}{defined_at(self.function)}") from None


def right_at(reward: Reward | None, setting: float | None) -> float:
    """The least reward of a right answer: the setting `reward.right_at` (`overrides` tells of it), otherwise
    what the function itself says, otherwise BEST_REWARD.

    Raises UserError where the function's attribute `right_at` is no number.
    """
    said = getattr(reward, "right_at", BEST_REWARD) if setting is None else setting
    if isinstance(said, bool) or not isinstance(said, Real) or not math.isfinite(said):
        raise UserError(
            f"reward.kind: the attribute right_at of the reward function is {said!r}; expected a number"
        )
    return float(said)


def overrides(reward: Reward, setting: float | None) -> str:
    """A line where the setting counts in place of what the function itself says; "" where it does not."""
    said = getattr(reward, "right_at", None)
    if setting is None or said is None or said == setting:
        return ""
    return (
        f"reward.right_at={setting:g} is set, and counts in place of {said!r}, the attribute right_at of the "
        "reward function: take the setting out if the function is to say it"
    )


def _as_reward(value: Any) -> float | None:
    """The result of a user's function as a number. Raises TypeError for a text, also for one such as "1"."""
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"returned the text {value!r}; expected a number or None")
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        raise TypeError(f"returned {returned_kind(value)}; expected a number or None") from None


def _of_answer(trajectory: Trajectory, score: Callable[[str, tuple[str, ...]], float]) -> float:
    answer = final_answer(trajectory)
    return 0.0 if answer is None else score(answer, trajectory.question.golden_answers)
