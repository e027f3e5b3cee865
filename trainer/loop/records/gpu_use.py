"""How busy the GPUs of the driver's machine are, by NVML, where there are any."""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import suppress
from typing import Any

from ray._private.thirdparty import pynvml

EVERY_SECONDS = 1.0
"""Between two samples. NVML's own value is of the last second at most, and one sample per step would always
be of the same stage."""


class GpuUse:
    """Samples in a thread of its own. Metrics are of the time since they were last taken.

    nvml: NVML's Python interface, for tests."""

    def __init__(self, nvml: Any = pynvml, every_seconds: float = EVERY_SECONDS) -> None:
        self._nvml = nvml
        self._every = every_seconds
        self._lock = threading.Lock()
        self._busy: dict[int, list[float]] = defaultdict(list)
        self._memory: dict[int, float] = {}
        self._ended = threading.Event()
        self._cards = self._found()
        if self._cards:
            threading.Thread(target=self._watch, name="gpu-use", daemon=True).start()

    def _found(self) -> list[Any]:
        try:
            self._nvml.nvmlInit()
            return [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]
        except self._nvml.NVMLError:  # no driver, or no card
            return []

    def _watch(self) -> None:
        while not self._ended.is_set():
            self.sample()
            self._ended.wait(self._every)

    def sample(self) -> None:
        """Look at each card once. What a card does not tell, as a divided one its use, is left out."""
        for number, card in enumerate(self._cards):
            busy = memory = None
            with suppress(self._nvml.NVMLError):
                memory = self._nvml.nvmlDeviceGetMemoryInfo(card)
                busy = self._nvml.nvmlDeviceGetUtilizationRates(card).gpu / 100
            with self._lock:
                if memory is not None:
                    self._memory[number] = max(self._memory.get(number, 0.0), memory.used / memory.total)
                if busy is not None:
                    self._busy[number].append(busy)

    def metrics(self) -> dict[str, float | None]:
        """`system/gpu_N`: mean share of time in which GPU N computed; `system/gpu_memory_N`: largest share of
        its memory in use, by all processes. Empty without a GPU."""
        with self._lock:
            busy = {f"system/gpu_{n}": sum(seen) / len(seen) for n, seen in self._busy.items()}
            memory = {f"system/gpu_memory_{n}": share for n, share in self._memory.items()}
            self._busy.clear()
            self._memory.clear()
        return {**busy, **memory}

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
