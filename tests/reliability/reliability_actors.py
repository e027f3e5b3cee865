"""Rollout workers that fail in their own ways. In a file of its own, so that Ray's workers can import it."""

from __future__ import annotations

import os
from pathlib import Path

from services.contracts import WorkerInfo
from services.rollout.errors import WorkerLostError
from services.rollout.worker.worker import RolloutWorker


class DeadEngineWorker(RolloutWorker):
    """While its model folder holds a file `dead-ID`, the actor lives and its engine is dead."""

    def info(self) -> WorkerInfo:
        if (Path(self._model_path) / f"dead-{self.id}").exists():
            raise WorkerLostError("the engine's process has ended")
        return super().info()


class BrokenWorker(RolloutWorker):
    """Does not get through its constructor."""

    def __init__(self, *args, **kwargs):
        raise ValueError("no such thing as a worker here")


class GpuWorker:
    """Tells which GPUs Ray lets it see. Asynchronous as a real worker is: for an actor of plain methods Ray
    starts as many threads as it may have calls, 10,000 here."""

    def __init__(self, *args, **kwargs):
        self.seen = os.environ.get("CUDA_VISIBLE_DEVICES")

    async def info(self) -> str | None:
        return self.seen
