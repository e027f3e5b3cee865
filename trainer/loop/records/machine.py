"""How busy the driver's machine is: a sample per step, for the likelihood store alone."""

from __future__ import annotations

import psutil

from trainer.loop.records.gpu_use import GpuUse


class MachineUse:
    """Samples since the last one. They go to the store and not to `metrics.jsonl`, whose lines are the same
    whenever a deterministic run is made again."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._gpus = GpuUse()
        psutil.cpu_percent(interval=None)  # the first call has nothing to compare with

    def metrics(self) -> dict[str, float | None]:
        """Metrics by name: shares from 0 to 1, those of GPUs among them, and GiB of this process."""
        return {
            "system/cpu": psutil.cpu_percent(interval=None) / 100,
            "system/memory": psutil.virtual_memory().percent / 100,
            "system/driver_gib": self._process.memory_info().rss / 2**30,
        } | self._gpus.metrics()

    def close(self) -> None:
        """Look at the GPUs no further."""
        self._gpus.end()
