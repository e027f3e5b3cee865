"""A rollout worker that fails when told to. In a file of its own, so that Ray's workers can import it."""

from __future__ import annotations

from pathlib import Path

from services.rollout.worker.worker import RolloutWorker


class FailingWorker(RolloutWorker):
    """While its model folder holds a file `fail-ID`, its engine runs out of memory in a sync."""

    async def update_weights(self, update):
        engine = self._engine
        whole = type(engine)._receive

        def receive(*args):
            if (Path(self._model_path) / f"fail-{self.id}").exists():
                raise MemoryError("out of memory")
            return whole(engine, *args)

        engine._receive = receive
        return await super().update_weights(update)
