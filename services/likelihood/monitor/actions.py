"""What the monitor may do about a phase: raise lambda, lower the learning rate, roll back, stop. Decides
only; the driver carries out.

A pure state machine beside PhaseMonitor. What it decides is a `MonitorAction` to be logged as an event, and
undone when it no longer applies: lambda and learning rate go back to the configured values once the run is
healthy again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from services.likelihood.monitor.phases import PhaseState
from services.likelihood.records import EventRecord

Kind = Literal["none", "raise_lambda", "lower_lr", "rollback", "stop"]
FALLING = ("decay", "acceleration")
CALM = ("healthy", "unknown")
"""No sign of a fall, so what was changed is undone. After a fall `unknown` means a run without rewards."""
OF_A_FALL = ("likelihood", "acceleration", "collapse", "nonfinite")
"""Rules whose alarms explain what is done about the phase."""
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
    """What the configured lambda is multiplied, or the learning rate divided, by from now on."""
    before_step: int | None
    """Rollback: the newest checkpoint from before this step."""
    why: str

    def event(self) -> EventRecord:
        """As it is logged."""
        name = f"monitor_{'undo_' if self.undo else ''}{self.kind}"
        return EventRecord(step=self.step, kind=name, text=self.why, data=asdict(self))


class MonitorActions:
    """`decide(state)` after each PhaseMonitor.update.

    raise_lambda, lower_lr: one change when a likelihood or acceleration alarm is raised, again each
    `patience_steps` steps that the phase stays decay or acceleration, at most MOST_CHANGES; all undone at the
    first healthy step. rollback: when the phase becomes acceleration or collapsed, to before the standing
    likelihood alarm began, and with half the learning rate, since the same prompts and weights would fall the
    same way again; MOST_CHANGES times at most; the learning rate is put back once the run is healthy
    `patience_steps` past the step at which it fell. stop: when the phase becomes collapsed.
    """

    def __init__(self, kind: Kind, patience_steps: int = 20):
        self.kind = kind
        self.patience_steps = patience_steps
        self.changes = 0
        self.last: int | None = None
        """Step of the latest change; after a rollback the step at which the run fell."""

    def decide(self, state: PhaseState) -> MonitorAction | None:
        if self.kind == "stop":
            begins = state.phase == "collapsed" and state.since == state.step
            return self._action(state, "stop") if begins else None
        if self.kind == "none":
            return None
        waited = self.last is None or state.step - self.last >= self.patience_steps
        if state.phase in CALM and self.changes and (self.kind != "rollback" or waited):
            self.changes = 0
            return self._action(state, self.kind, undo=True)
        if self.changes >= MOST_CHANGES:
            return None
        if self.kind == "rollback":
            if state.phase not in ("acceleration", "collapsed") or state.since != state.step:
                return None
            began = next((a.since for a in state.active if a.rule == "likelihood"), state.since)
            self.changes += 1
            return self._action(state, "rollback", before=began)
        raised = not self.changes and any(a.rule in ("likelihood", "acceleration") for a in state.alarms)
        if state.phase not in FALLING or not (raised or (self.changes and waited)):
            return None
        self.changes += 1
        return self._action(state, self.kind)

    def lambda_of(self, configured: float) -> float:
        """The lambda to use now. A run without LLDS gets FIRST_LAMBDA as its starting point."""
        if self.kind != "raise_lambda" or not self.changes:
            return configured
        return (configured or FIRST_LAMBDA / STEP_BACK) * STEP_BACK**self.changes

    @property
    def lr_scale(self) -> float:
        """What the configured learning rate is multiplied by now."""
        return STEP_BACK**-self.changes if self.kind in ("lower_lr", "rollback") else 1.0

    def _action(
        self, state: PhaseState, kind: Kind, *, undo: bool = False, before: int | None = None
    ) -> MonitorAction:
        self.last = state.step
        seen = next(
            (a.seen for a in reversed(state.active) if a.rule in OF_A_FALL),
            "no alarm stands",
        )
        why = (
            f"{state.phase} since step {state.since}: back to the configured value"
            if undo
            else f"phase {state.phase}: {seen}"
        )
        return MonitorAction(
            state.step, kind, undo, 1.0 if undo or kind == "stop" else STEP_BACK**self.changes, before, why
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON. A rollback keeps it: it must remember what was tried."""
        return {"changes": self.changes, "last": self.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.changes = state["changes"]
        self.last = state["last"]
