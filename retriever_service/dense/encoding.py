"""Encoding a corpus in several processes: one per GPU, or each with its share of the cores.

Each process has the whole model and takes parts of PART passages. A part is encoded by itself, whichever
process takes it, so the vectors are the same bits for any number of processes. A process ends at once with
the one that started it, however that ends: nobody would take its vectors.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

import numpy as np

from retriever_service.dense.encoder import Encoder, EncoderSettings
from retriever_service.dense.gpus import gpu_count
from services.common.errors import EnvironmentLacks
from services.common.processes import signals
from services.common.processes.parent import when_parent_ends

PART = 2_000
"""Passages that one process encodes at a time."""
_LOOK_SECONDS = 1.0
_END_SECONDS = 1.0
"""An idle process ends within milliseconds of its pipe."""
_GO_ON = "the same command goes on where it was"


class PassageEncoder(Protocol):
    """Makes vectors of passages."""

    dimension: int
    tokens: int
    """Tokens that were encoded so far, without padding."""

    def passages(self, texts: list[str]) -> np.ndarray:
        """Unit vectors, float32 [n, dimension]."""


class EncoderPool:
    """Encoders in `processes` processes. They start with the first passages, and end with `close`."""

    def __init__(self, encoder: Encoder, processes: int) -> None:
        self.dimension = encoder.dimension
        self.tokens = 0
        self.processes = processes
        self._settings = encoder.settings
        self._dtype = encoder.dtype
        self._devices = _devices(processes)
        self._at_work: list[tuple[str, SpawnProcess, Connection]] = []

    def passages(self, texts: list[str]) -> np.ndarray:
        """As PassageEncoder. Raises EnvironmentLacks where a process fails."""
        self._start()
        parts = [texts[begin : begin + PART] for begin in range(0, len(texts), PART)]
        found: list[np.ndarray] = []
        for begin in range(0, len(parts), self.processes):
            taken = parts[begin : begin + self.processes]
            for (device, process, pipe), part in zip(self._at_work, taken, strict=False):
                _send(device, process, pipe, part)
            for device, process, pipe in self._at_work[: len(taken)]:
                vectors, tokens = _received(device, process, pipe)
                found.append(vectors)
                self.tokens += tokens
        return np.concatenate(found)

    def close(self) -> None:
        """End the processes, in the middle of a part too: its vectors would go nowhere."""
        for _, _, pipe in self._at_work:
            pipe.close()
        until = time.monotonic() + _END_SECONDS
        for _, process, _ in self._at_work:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(10)
        self._at_work.clear()

    def _start(self) -> None:
        if self._at_work:
            return
        spawn = multiprocessing.get_context("spawn")
        threads = _threads(self.processes)
        for device in self._devices:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_serve, args=(theirs, self._settings, self._dtype, device, threads), daemon=True
            )
            process.start()
            theirs.close()
            self._at_work.append((device, process, ours))


def automatic() -> int:
    """Processes where none are asked for: one per GPU, otherwise one."""
    return max(1, gpu_count())


def _threads(processes: int) -> int:
    """Threads of each process: its share of those that this one may use (affinity, OMP_NUM_THREADS)."""
    import torch

    return max(1, torch.get_num_threads() // processes)


def _devices(processes: int) -> list[str]:
    gpus = gpu_count()
    return [f"cuda:{number % gpus}" if gpus else "cpu" for number in range(processes)]


def _send(device: str, process: SpawnProcess, pipe: Connection, part: list[str]) -> None:
    with _alive(device, process):
        pipe.send(part)


def _received(device: str, process: SpawnProcess, pipe: Connection) -> tuple[np.ndarray, int]:
    with _alive(device, process):
        while not pipe.poll(_LOOK_SECONDS):
            if not process.is_alive() and not pipe.poll():
                raise EOFError
        found: Any = pipe.recv()
    if isinstance(found, str):
        raise EnvironmentLacks(f"encoder on {device}: {found}; {_GO_ON}")
    return found


@contextmanager
def _alive(device: str, process: SpawnProcess) -> Iterator[None]:
    """Around the use of a pipe to an encoder's process: raises EnvironmentLacks where that has ended."""
    try:
        yield
    except (EOFError, OSError):
        process.join(10)
        raise EnvironmentLacks(
            f"encoder on {device}: its process ended (exit status {process.exitcode}, -9 where memory ran "
            f"out); {_GO_ON}, with fewer --encoders if need be"
        ) from None


def _opened(settings: EncoderSettings, dtype: str, device: str, threads: int) -> Encoder:
    import torch

    torch.set_num_threads(threads)
    return Encoder(settings, dtype=dtype, device=device)


def _serve(pipe: Connection, settings: EncoderSettings, dtype: str, device: str, threads: int) -> None:
    """Encode what comes through the pipe until its other end is closed."""
    signals.left_to_parent()
    when_parent_ends(lambda: os._exit(1))
    encoder: Encoder | None = None
    try:
        while True:
            part = pipe.recv()
            try:
                encoder = encoder or _opened(settings, dtype, device, threads)
                before = encoder.tokens
                vectors = encoder.passages(part)
                answer: Any = (vectors, encoder.tokens - before)
            except Exception as error:  # of torch or of the model, whatever it is: one line for the build
                answer = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            pipe.send(answer)
    except (EOFError, OSError):  # the other end is closed
        return
