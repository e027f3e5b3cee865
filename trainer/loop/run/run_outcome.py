"""What a run has come to: its step, phase and scores, which its summary tells."""

from __future__ import annotations

from typing import Any

from services.likelihood.monitor.phases import PhaseMonitor
from trainer.config.schema import Config
from trainer.loop.run import performance, sources
from trainer.loop.run.best import Best
from trainer.loop.run.reward_course import course_of_run
from trainer.loop.run.run_folder import RunFolder


class RunOutcome:
    """Step, monitor and scores of one run. It needs no learner, pool or prompts: a run that is over has its
    outcome too."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self.config = config
        self.folder = folder
        self.step = 0
        """The last step whose update is over."""
        self.monitor = PhaseMonitor(config.monitor.rules)
        self.scores: dict[str, Any] = {}
        """Of the evaluations so far, by `WHEN/MODE`, each with its step. `after` is the newest end of the
        run; an earlier one is `afterSTEP`."""
        self.best = Best(by=config.trainer.best_by)
        self.learner_ranks: list[Any] = []

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

    def take_up(self, state: dict[str, Any]) -> None:
        """Stand where the run stood when `state`, the driver's part of a checkpoint, was made."""
        self.step = state["step"]
        self.monitor.load_state_dict(state["monitor"])
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
        # Held-out scores of the last step's weights: the monitor reads lines, and none follows.
        last = {
            f"eval/em_{tag.split('/')[1]}"
            for tag, score in self.scores.items()
            if score.get("step") == self.step
        }
        if undecided := self.monitor.undecided(last if self.step else ()):
            out["undecided"] = undecided
        if course := course_of_run(self.folder.metrics_path):
            out["reward"] = course
        settings = self.config.trainer
        if (settings.keep_best or settings.patience) and self.best.score is not None:
            out["best"] = {"step": self.best.step, "score": self.best.score, "by": settings.best_by}
        if why := self.best.why_to_end(settings):
            out["stopped"] = why
        if numbers := performance.of_run(self.folder.metrics_path, self.learner_ranks):
            out["performance"] = numbers
        return out
