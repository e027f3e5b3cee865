"""The best held-out score of a run so far: which checkpoint is kept for it, and when patience is at its
end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.common.counting import counted
from trainer.config.schema import TrainerSettings
from trainer.learner.checkpoint import mark_best, prune, put_back, step_folder
from trainer.loop.run.sources import compared


@dataclass
class Best:
    """The best greedy score of `trainer.best_by`, by the step whose weights earned it; 0 is the start."""

    step: int | None = None
    """None before the first evaluation."""
    score: float | None = None
    at: int | None = None
    """The last step that was evaluated, with a score."""
    asked: int | None = None
    """The last step that was evaluated, with a score or without one."""
    since: int = 0
    """Evaluations after it that were no better."""
    by: str | None = None
    """The kind of score; None in checkpoints of earlier versions."""

    @classmethod
    def of_scores(cls, scores: Mapping[str, Mapping[str, Any]], step: int, by: str) -> Best:
        """The best of a run's evaluations up to `step`, from all the scores that it keeps by `WHEN/MODE`.
        Scores after the end of a run that an earlier version kept have no step, and are left out."""
        best = cls(by=by)
        found: list[tuple[int, float | None]] = []
        for tag, score in scores.items():
            when, _, mode = tag.partition("/")
            at = score.get("step", _step_of(when))
            if mode == "greedy" and at is not None and at <= step:
                found.append((at, compared(score, by)))
        for at, value in sorted(found, key=lambda one: one[0]):
            best.take(at, value)
        return best

    def take(self, step: int, score: float | None) -> bool:
        """Note an evaluation; whether it is the best. The earlier of two equal ones is. A step that is
        evaluated again, as the last one is after the run, is not counted twice. score: None where no answer
        has any; the evaluation then counts for nothing."""
        self.asked = step
        if score is None or step == self.at:
            return False
        self.at = step
        if self.score is None or score > self.score:
            self.step = step
            self.score = score
            self.since = 0
            return True
        self.since += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, JSON-able."""
        return asdict(self)

    def why_to_end(self, settings: TrainerSettings) -> str | None:
        """The reason to end the run, once `trainer.patience` evaluations brought nothing better."""
        if not settings.patience or self.since < settings.patience:
            return None
        return (
            f"no better held-out {settings.best_by} in {counted(self.since, 'evaluation')} (trainer.patience="
            f"{settings.patience}): the best is {self.score:.3f}, at step {self.step}"
        )

    def folder(self, run: Path) -> Path | None:
        """Its checkpoint, where there is one."""
        if not self.step:
            return None
        folder = step_folder(run, self.step)
        return folder if folder.is_dir() else None

    def keep(self, run: Path, settings: TrainerSettings) -> None:
        """Remove old checkpoints of a run. With `trainer.keep_best` that of the best step stays, and
        `checkpoints/best` leads to it."""
        put_back(run)
        folder = self.folder(run) if settings.keep_best else None
        if settings.keep_best:
            mark_best(run, folder)
        prune(run, settings.keep_checkpoints, folder)


def _step_of(when: str) -> int | None:
    """The step of an evaluation whose scores do not name it, by the name that it has in `RunState.scores`."""
    if when == "before":
        return 0
    number = when.removeprefix("step")
    return int(number) if number.isdecimal() else None
