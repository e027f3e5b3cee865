"""What a measurement looks at from beside: how busy the GPU is, and which functions the process is in."""

from __future__ import annotations

import collections
import os
import shutil
import statistics
import subprocess
import threading
from pathlib import Path
from typing import Any

EVERY_SECONDS = 0.1


class BusyShare:
    """Mean of the share of time in which a kernel ran on the first visible GPU, while the context lasts; None
    without NVML. NVML itself averages over a sixth of a second or more."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> BusyShare:
        try:
            import pynvml

            pynvml.nvmlInit()
            first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(first))
        except Exception:  # no NVML, no GPU, or a GPU named otherwise than by number
            return self

        def watch() -> None:
            while not self._over.wait(EVERY_SECONDS):
                self.samples.append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)

        self._thread = threading.Thread(target=watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def mean(self) -> float | None:
        return statistics.mean(self.samples) if self.samples else None


class Profile:
    """py-spy on this process, or on another, while the context lasts. `top` holds the functions that most
    samples were in, with their shares; empty where py-spy is not installed or may not look, or is given no
    time."""

    def __init__(self, file: Path, seconds: int, pid: int | None = None) -> None:
        self.file, self.seconds = file, seconds
        self.pid = pid or os.getpid()
        self.top: list[tuple[str, float]] = []

    def __enter__(self) -> Profile:
        program = shutil.which("py-spy")
        self._process = None
        self.file.unlink(missing_ok=True)
        if program is not None and self.seconds:
            self._process = subprocess.Popen(
                [
                    *(program, "record", "--pid", str(self.pid), "--duration", str(self.seconds)),
                    *("--rate", "200", "--format", "raw", "--output", str(self.file), "--nonblocking"),
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        return self

    def __exit__(self, *error: Any) -> None:
        if self._process is not None:
            self._process.wait(timeout=self.seconds + 60)
        if self.file.is_file():
            self.top = top_functions(self.file.read_text(encoding="utf-8"))


def top_functions(stacks: str, count: int = 25) -> list[tuple[str, float]]:
    """From py-spy's raw form, `a;b;c 12` a line: each function's share of the samples in which it was the
    innermost."""
    seen: collections.Counter[str] = collections.Counter()
    for line in stacks.splitlines():
        stack, _, times = line.rpartition(" ")
        seen[stack.split(";")[-1]] += int(times)
    total = sum(seen.values())
    return [(name, n / total) for name, n in seen.most_common(count)]
