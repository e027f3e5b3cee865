"""What a measurement looks at from beside: how busy the GPU is, and which functions the process is in."""

from __future__ import annotations

import collections
import os
import shutil
import statistics
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

EVERY_SECONDS = 0.1
PARTS = {
    "scheduler": ("schedule scheduler.py",),
    "prefix cache": (
        "get_computed_blocks kv_cache_manager.py",
        "_get_local_prefix_cache_hit scheduler.py",
        "cache_blocks kv_cache_manager.py",
        "update_block_hashes request.py",
    ),
    "outputs of a step": ("update_from_output scheduler.py",),
    "tokens held back": ("hold vllm_held_outputs.py",),
    "requests that come and go": (
        "process_input_sockets core.py",
        "_process_input_queue core.py",
        "_process_aborts_queue core.py",
    ),
    "messages written": ("process_output_sockets core.py",),
    "inputs of the model": (
        "_update_states gpu_model_runner.py",
        "_prepare_inputs gpu_model_runner.py",
        "_build_attention_metadata gpu_model_runner.py",
        *(
            f"{name} model_runner.py"
            for name in ("add_requests", "update_requests", "finish_requests", "gather_batch_req_state")
        ),
        *(f"{name} model_runner.py" for name in ("prepare_inputs", "prepare_attn")),
        "apply_staged_writes block_table.py",
        "prepare_attn default.py",
    ),
    "model, one graph": ("run_fullgraph cudagraph_utils.py",),
    "model, many graphs": ("run_pw_graph cudagraph_utils.py",),
    "model, no graph": ("_model_forward gpu_model_runner.py", "execute_model model_runner.py"),
    "sampler": ("_sample gpu_model_runner.py", "sample model_runner.py"),
    "log-probs": (
        "compute_logprobs sampler.py",
        "gather_logprobs sampler.py",
        "compute_topk_scores logprob.py",
    ),
    "wait for the model": ("get_output async_utils.py", "get_output gpu_model_runner.py"),
}
"""Parts of the engine's process, each with functions of vLLM 0.32 (both of its model runners) or of ours, and
their files. A sample belongs to the innermost of these functions that it was in."""


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
    samples were in, with their shares, and `parts` the share of each of PARTS; both are empty where py-spy is
    not installed or may not look, or is given no time."""

    def __init__(self, file: Path, seconds: int, pid: int | None = None) -> None:
        self.file, self.seconds = file, seconds
        self.pid = pid or os.getpid()
        self.top: list[tuple[str, float]] = []
        self.parts: dict[str, float] = {}

    def __enter__(self) -> Profile:
        program = shutil.which("py-spy")
        self._process = None
        self.file.unlink(missing_ok=True)
        if program is not None and self.seconds:
            self._process = subprocess.Popen(
                [
                    *(program, "record", "--pid", str(self.pid), "--duration", str(self.seconds)),
                    *("--rate", "200", "--format", "raw", "--output", str(self.file)),
                    *("--nonblocking", "--function"),
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        return self

    def __exit__(self, *error: Any) -> None:
        if self._process is not None:
            self._process.wait(timeout=self.seconds + 60)
        if self.file.is_file():
            stacks = self.file.read_text(encoding="utf-8")
            self.top, self.parts = top_functions(stacks), shares(stacks)


def top_functions(stacks: str, count: int = 25) -> list[tuple[str, float]]:
    """From py-spy's raw form, `a;b;c 12` a line: each function's share of the samples in which it was the
    innermost."""
    seen: collections.Counter[str] = collections.Counter()
    for line in stacks.splitlines():
        stack, _, times = line.rpartition(" ")
        seen[stack.split(";")[-1]] += int(times)
    total = sum(seen.values())
    return [(name, n / total) for name, n in seen.most_common(count)]


def shares(stacks: str) -> dict[str, float]:
    """Each part's share of the samples, the largest first; `other` is what belongs to none."""
    part_of = {function: part for part, functions in PARTS.items() for function in functions}
    seen: collections.Counter[str] = collections.Counter()
    for line in stacks.splitlines():
        stack, _, times = line.rpartition(" ")
        for frame in reversed(stack.split(";")):
            # `schedule (vllm/v1/core/sched/scheduler.py:805)`, from Python 3.11 on `Scheduler.schedule (...)`
            name, _, place = frame.partition(" (")
            name = name.rpartition(".")[2]
            part = part_of.get(f"{name} {place.partition(':')[0].rpartition('/')[2]}")
            if part is not None:
                break
        seen[part or "other"] += int(times)
    total = sum(seen.values())
    return {part: n / total for part, n in seen.most_common()}


def seconds_of(pid: int) -> float:
    """Processor time of a process so far; none of one that has ended, as a compiler that an engine calls."""
    try:
        return sum(psutil.Process(pid).cpu_times()[:2])
    except psutil.NoSuchProcess:
        return 0.0


def busiest(pids: Sequence[int]) -> int | None:
    """The process that has computed for the longest: beside an engine's runs Python's tracker of shared
    memory. None of none."""
    return max(pids, key=seconds_of, default=None)
