"""What the monitor may do about a phase: raise lambda, lower the learning rate, roll back, stop. Decides only; the driver carries out.

A pure state machine beside PhaseMonitor. What it decides is a `MonitorAction` to be logged as an event, and undone when it no longer applies:
lambda and learning rate go back to the configured values once the run is healthy again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from services.likelihood.monitor import PhaseState
from services.likelihood.records import EventRecord

Kind = Literal["none", "raise_lambda", "lower_lr", "rollback", "stop"]
FALLING = ("decay", "acceleration")
STEP_BACK = 2.0
"""Factor of one change of lambda or of the learning rate."""
MOST_CHANGES = 3
"""Changes before an undo: lambda at most x 8, learning rate at most / 8."""
FIRST_LAMBDA = 0.1
"""Lambda that a run without LLDS is given."""


@dataclass(frozen=True)
class MonitorAction:
    """One thing to do."""

    step: int
    kind: Kind
    undo: bool
    """Whether an earlier action is taken back."""
    factor: float
    """What the configured lambda or learning rate is multiplied by from now on; 1 for rollback and stop."""
    before_step: int | None
    """Rollback: the newest checkpoint from before this step."""
    why: str

    def event(self) -> EventRecord:
        """As it is logged."""
        name = f"monitor_{'undo_' if self.undo else ''}{self.kind}"
        return EventRecord(step=self.step, kind=name, text=self.why, data=asdict(self))


class MonitorActions:
    """`decide(state)` after each PhaseMonitor.update.

    raise_lambda, lower_lr: one change when a likelihood or acceleration alarm is raised, again each `patience_steps` steps that the
    phase stays decay or acceleration, at most MOST_CHANGES; all undone at the first healthy step. rollback: when the phase becomes
    acceleration or collapsed, to before the standing likelihood alarm began; not again within `patience_steps`, and twice at most for the same
    stretch of the run. stop: when the phase becomes collapsed.
    """

    def __init__(self, kind: Kind, patience_steps: int = 20):
        self.kind, self.patience_steps = kind, patience_steps
        self.changes = 0
        self.last = -patience_steps
        self.rolled_back: list[int] = []

    @property
    def factor(self) -> float:
        """What the configured value is multiplied by now."""
        return STEP_BACK**self.changes if self.kind == "raise_lambda" else STEP_BACK**-self.changes

    def decide(self, state: PhaseState) -> MonitorAction | None:
        if self.kind in ("raise_lambda", "lower_lr"):
            return self._change(state)
        if self.kind == "rollback":
            return self._rollback(state)
        if self.kind == "stop" and state.phase == "collapsed" and state.since == state.step:
            return self._action(state, "stop", why=f"phase collapsed: {self._seen(state)}")
        return None

    def lambda_of(self, configured: float) -> float:
        """The lambda to use now. A run without LLDS gets FIRST_LAMBDA as its starting point."""
        if self.kind != "raise_lambda" or not self.changes:
            return configured
        return (configured or FIRST_LAMBDA / STEP_BACK) * self.factor

    def lr_of(self, configured: float) -> float:
        """The learning rate to use now."""
        return configured * self.factor if self.kind == "lower_lr" else configured

    def _change(self, state: PhaseState) -> MonitorAction | None:
        if state.phase == "healthy" and self.changes:
            self.changes = 0
            return self._action(
                state, self.kind, undo=True, why=f"healthy since step {state.since}: back to the configured value"
            )
        raised = any(a.rule in ("likelihood", "acceleration") for a in state.alarms)
        waited = state.step - self.last >= self.patience_steps
        if state.phase not in FALLING or self.changes >= MOST_CHANGES or not (waited or (raised and not self.changes)):
            return None
        self.changes += 1
        return self._action(state, self.kind, why=f"phase {state.phase}: {self._seen(state)}")

    def _rollback(self, state: PhaseState) -> MonitorAction | None:
        if (
            state.phase not in ("acceleration", "collapsed")
            or state.since != state.step
            or state.step - self.last < self.patience_steps
        ):
            return None
        began = next((a.since for a in state.active if a.rule == "likelihood"), state.since)
        if sum(abs(began - b) < self.patience_steps for b in self.rolled_back) >= 2:
            return None
        self.rolled_back.append(began)
        return self._action(state, "rollback", before=began, why=f"phase {state.phase}: {self._seen(state)}")

    def _action(
        self, state: PhaseState, kind: Kind, *, undo: bool = False, before: int | None = None, why: str
    ) -> MonitorAction:
        self.last = state.step
        return MonitorAction(state.step, kind, undo, self.factor, before, why)

    @staticmethod
    def _seen(state: PhaseState) -> str:
        return state.active[-1].seen if state.active else "no alarm stands"

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON. After a rollback keep it: it must remember what was tried."""
        return {"changes": self.changes, "last": self.last, "rolled_back": self.rolled_back}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.changes, self.last, self.rolled_back = state["changes"], state["last"], list(state["rolled_back"])
