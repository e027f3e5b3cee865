"""Metrics of the user's own: functions that `trainer.metrics` names, called once per step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol

from services.common.loading.user_code import ENDS, Call, by_signal, load, told
from services.common.printing.kinds import returned_kind
from services.contracts import Trajectory

KEY = "trainer.metrics"
RUNS_OWN = {
    "batch_kl", "data", "displacement", "entropy", "eval", "grad_norm", "groups", "importance", "kl", "leak",
    "learner", "llds", "logp", "lr", "mismatch", "nll", "phase", "policy", "probe", "ratio", "retrieval",
    "reward", "rollout", "step", "supervised", "sync", "system", "text", "time",
}  # fmt: skip
"""How metrics of a run begin (docs/metrics.md): what stands before the first `/`."""


EXPECTED = "expected numbers by name, such as {'my/queries': 1.0}"


class StepMetrics(Protocol):
    """What an import path in `trainer.metrics` names."""

    def __call__(
        self, trajectories: Sequence[Trajectory], rewards: Sequence[float]
    ) -> Mapping[str, float | None]:
        """Numbers of one step by name, such as `my/queries`. rewards: one per trajectory, NaN where it has
        none. A value that is None or not finite is left out."""


def load_metrics(paths: Sequence[str]) -> dict[str, StepMetrics]:
    """The functions by their paths. Raises UserError, one line with the key."""
    what = "a function of trajectories and rewards"
    return {path: load(KEY, path, what, Call(2), listed=True) for path in paths}


class UsersMetrics:
    """The functions of one run. One that fails is told once, and left out: it never ends a run."""

    def __init__(self, functions: Mapping[str, StepMetrics], say: Callable[[str], None]) -> None:
        self._functions = functions
        self._say = say
        self._told: set[str] = set()

    def of(
        self, trajectories: Sequence[Trajectory], rewards: Sequence[float], known: Mapping[str, object]
    ) -> dict[str, float]:
        """The numbers of a step. known: metrics that the run has by itself, whose names nobody else may
        use."""
        out: dict[str, float] = {}
        for path, function in self._functions.items():
            try:
                returned: object = function(trajectories, rewards)
                found = _by_name(returned)
            except ENDS as e:
                if by_signal(e):
                    raise
                self._tell(path, told(e))
                continue
            except Exception as e:  # a user's function may raise anything
                self._tell(path, told(e))
                continue
            for name, value in found.items():
                if value is None:
                    continue
                if not isinstance(name, str):
                    self._tell(f"{path}: {name!r}", f"expected a name, got {returned_kind(name)}; {EXPECTED}")
                elif name in known or name in out:
                    self._tell(f"{path}: {name}", "the name is taken; give another, such as my/name")
                elif isinstance(value, bool) or not isinstance(value, Real):
                    self._tell(f"{path}: {name}", f"expected a number, got {value!r}; {EXPECTED}")
                elif math.isfinite(value):
                    out[name] = float(value)
        return out

    def _tell(self, what: str, why: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._say(f"{KEY}: {what}: left out: {why}")


def _by_name(returned: Any) -> dict[Any, Any]:
    """What a function returned, as a dictionary. Raises TypeError where it is none."""
    if isinstance(returned, Iterator):  # of a generator, whose own error must stay as it is
        returned = list(returned)
    try:
        return dict(returned)
    except (TypeError, ValueError):
        raise TypeError(f"returned {returned_kind(returned)}; {EXPECTED}") from None
