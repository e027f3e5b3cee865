"""Where a run stands: what its checkpoints hold beside the learner's own state."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from services.likelihood.monitor.actions import MonitorActions
from trainer.loop.run.run_outcome import RunOutcome
from trainer.loop.run.system import System


class RunState(RunOutcome):
    """Step, attempt, version of the weights, prompt cursor, monitor and scores of one run."""

    def __init__(self, system: System) -> None:
        super().__init__(system.config, system.folder)
        self.system = system
        self.in_hand: int | None = None
        """The step that is being made, from its first prompt to its record."""
        self.attempt = 0
        self.version = 0
        """Of the learner's weights: one more after each step and after a rollback, since the workers take no
        lower one."""
        self.cursor_state: dict[str, Any] = system.cursor.state_dict()
        """The prompt cursor after this step; the cursor itself may be ahead of it."""
        self.actions = MonitorActions(self.config.monitor.action)
        self.checkpointable = True
        """Whether learner, cursor, monitor and files stand at the end of the same step, which a checkpoint
        may then hold. While the next step is being sampled they still do."""
        self.unfinished: int | None = None
        """The step whose update has begun, until it is recorded."""
        self.first_state = copy.deepcopy(self.state_dict())
        """Before any step and checkpoint."""
        self.base: Path | None = None
        """The checkpoint from which this process went on."""
        self.base_step = 0
        """Step of that checkpoint."""

    @property
    def shown_step(self) -> int:
        """The step that people read of what is being done: the one in hand, between two the last one."""
        return self.step if self.in_hand is None else self.in_hand

    def state_dict(self) -> dict[str, Any]:
        """The driver's part of a checkpoint, JSON-able."""
        return {
            "step": self.step,
            "attempt": self.attempt,
            "version": self.version,
            "cursor": self.cursor_state,
            "monitor": self.monitor.state_dict(),
            "actions": self.actions.state_dict(),
            "scores": self.scores,
            "best": self.best.state_dict(),
            "identity": self.system.identity,
        }

    def take_up(self, state: dict[str, Any]) -> None:
        """Stand where `state_dict` was made, with a version that is not lower than it was."""
        super().take_up(state)
        self.attempt = state["attempt"]
        self.version = max(self.version, state["version"])
        self.cursor_state = state["cursor"]
        self.system.cursor.load_state_dict(self.cursor_state)
        self.actions.load_state_dict(state["actions"])
