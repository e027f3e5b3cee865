"""Where a run stands: what its checkpoints hold beside the learner's own state."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from services.likelihood.monitor.actions import MonitorActions
from services.likelihood.monitor.phases import PhaseMonitor
from trainer.loop.run import performance, sources
from trainer.loop.run.best import Best
from trainer.loop.run.reward_course import course_of_run
from trainer.loop.run.system import System


class RunState:
    """Step, attempt, version of the weights, prompt cursor, monitor and scores of one run."""

    def __init__(self, system: System) -> None:
        config = system.config
        self.system = system
        self.config = config
        self.step = 0
        """The last step whose update is over."""
        self.in_hand: int | None = None
        """The step that is being made, from its first prompt to its record."""
        self.attempt = 0
        self.version = 0
        """Of the learner's weights: one more after each step and after a rollback, since the workers take no
        lower one."""
        self.cursor_state: dict[str, Any] = system.cursor.state_dict()
        """The prompt cursor after this step; the cursor itself may be ahead of it."""
        self.monitor = PhaseMonitor(config.monitor.rules)
        self.actions = MonitorActions(config.monitor.action)
        self.scores: dict[str, Any] = {}
        """Of the evaluations so far, by `WHEN/MODE`, each with its step. `after` is the newest end of the
        run; an earlier one is `afterSTEP`."""
        self.best = Best(by=config.trainer.best_by)
        self.learner_ranks: list[Any] = []
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

    def held_out(self, step: int) -> dict[str, float]:
        """Held-out scores of the evaluation after a step (0: before the first), as metrics; empty where there
        was none."""
        when = f"step{step}" if step else "before"
        scores = {mode: self.scores.get(f"{when}/{mode}") for mode in ("greedy", "sampled")}
        found: dict[str, float] = {}
        for mode, score in scores.items():
            if score:
                found |= sources.score_metrics(score, mode)
        return found

    def keep_scores(self, when: str, mode: str, scores: dict[str, Any]) -> None:
        """Keep the scores of an evaluation after this step. The end of an earlier part of the run stays."""
        tag = f"{when}/{mode}"
        earlier = self.scores.get(tag, {}).get("step", self.step)
        if earlier != self.step:
            self.scores[f"{when}{earlier}/{mode}"] = self.scores[tag]
        self.scores[tag] = scores | {"step": self.step}

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
        self.step = state["step"]
        self.attempt = state["attempt"]
        self.version = max(self.version, state["version"])
        self.cursor_state = state["cursor"]
        self.system.cursor.load_state_dict(self.cursor_state)
        self.monitor.load_state_dict(state["monitor"])
        self.actions.load_state_dict(state["actions"])
        self.scores = state["scores"]
        self.best = Best(**state.get("best", {}))  # earlier versions kept none
        if self.best.by is None:  # nor by which score
            settings = (state.get("identity") or {}).get("settings") or {}
            self.best.by = settings.get("trainer", {}).get("best_by")
        self.recall_best()

    def recall_best(self) -> None:
        """Take the best from the scores where the state knows none, or one by another kind of score."""
        by = self.config.trainer.best_by
        if self.best.at is None or self.best.by not in (by, None):
            self.best = Best.of_scores(self.scores, self.step, by)
        self.best.by = by

    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds, but seconds and exit status."""
        out: dict[str, Any] = {"steps": self.step, "phase": self.monitor.phase}
        for when in ("before", "after"):
            for mode, suffix in (("greedy", ""), ("sampled", "_sampled")):
                score = self.scores.get(f"{when}/{mode}")
                if score and (when == "before" or score.get("step", self.step) == self.step):
                    out[f"em_{when}{suffix}"] = score["em"]
                    if "n" in score:
                        out["em_questions"] = score["n"]
        if undecided := self.monitor.undecided():
            out["undecided"] = undecided
        if course := course_of_run(self.system.folder.metrics_path):
            out["reward"] = course
        settings = self.config.trainer
        if (settings.keep_best or settings.patience) and self.best.score is not None:
            out["best"] = {"step": self.best.step, "score": self.best.score, "by": settings.best_by}
        if why := self.best.why_to_end(settings):
            out["stopped"] = why
        if numbers := performance.of_run(self.system.folder.metrics_path, self.learner_ranks):
            out["performance"] = numbers
        return out
