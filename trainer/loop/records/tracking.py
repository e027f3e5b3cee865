"""Steps of a run to other trackers, as `tracking` asks for. None of them ever holds up or stops a run."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.common.errors import EnvironmentLacks
from services.likelihood.exports.mirrors import (
    Mirror,
    Mirroring,
    MlflowMirror,
    TensorBoardMirror,
    WandbMirror,
)
from services.likelihood.monitor.alarms import PHASES
from services.settings import TrackingSettings

CLOSE_SECONDS = 10.0
Say = Callable[[str], None]


class Tracking:
    """The trackers of one run. `step` hands over and returns; a thread of their own does the rest."""

    def __init__(self, settings: TrackingSettings, run: str, folder: Path, say: Say) -> None:
        self._run = run
        mirrors = opened(settings, folder, say)
        self._mirroring = Mirroring([Told(mirror, key, say) for key, mirror in mirrors]) if mirrors else None

    def step(self, metrics: dict[str, Any]) -> None:
        """One line of metrics.jsonl, or the scores of an evaluation with their step."""
        if self._mirroring is None:
            return
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and name not in ("step", "attempt")
        }
        phase = metrics.get("phase")
        self._mirroring.step(
            self._run, metrics["step"], time.time(), dict(numbers), phase if phase in PHASES else None
        )

    def close(self) -> None:
        """Hand over what waits, for CLOSE_SECONDS at most: a tracker that hangs keeps no run from its end."""
        if self._mirroring is not None:
            with suppress(queue.Full):
                self._mirroring.close(CLOSE_SECONDS)


def opened(settings: TrackingSettings, folder: Path, say: Say) -> list[tuple[str, Mirror]]:
    """The trackers that are asked for, each with its key. One that cannot be used is told in one line, and
    left out."""
    out: list[tuple[str, Mirror]] = []
    makers: tuple[tuple[str, str | bool | None, Callable[[Any], Mirror]], ...] = (
        ("tracking.tensorboard", settings.tensorboard, lambda given: TensorBoardMirror(_logs(given, folder))),
        ("tracking.wandb", settings.wandb, WandbMirror),
        ("tracking.mlflow", settings.mlflow, MlflowMirror),
    )
    for key, given, make in makers:
        if not given:
            continue
        try:
            out.append((key, make(given)))
        except EnvironmentLacks as e:
            say(f"{key}={given}: left out: {e}")
    return out


def _logs(given: str | bool, folder: Path) -> Path:
    return folder / "tensorboard" if given is True else Path(str(given))


class Told:
    """A tracker whose first failure is told on the terminal; later ones are only logged."""

    def __init__(self, mirror: Mirror, key: str, say: Say) -> None:
        self._mirror = mirror
        self._key = key
        self._say = say
        self._told = False

    def step(self, *given: Any) -> None:
        try:
            self._mirror.step(*given)
        except Exception as e:  # a tracker may raise anything
            if self._told:
                raise
            self._told = True
            reason = " ".join(str(e).split())[:300]
            self._say(
                f"{self._key}: step {given[1]} was not taken ({type(e).__name__}: {reason}); "
                "the run goes on, and later steps are tried"
            )

    def close(self) -> None:
        """A tracker that fails to close has no more to lose."""
        try:
            self._mirror.close()
        except Exception as e:
            self._say(f"{self._key}: not closed cleanly ({type(e).__name__})")
