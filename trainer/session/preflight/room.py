"""Room on disk and in memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil

from services.common.errors import EnvironmentLacks
from services.settings import CPU_CACHE_GIB
from trainer.config.schema import Config
from trainer.session.preflight.sizes import adapter_count, parameter_count

GIB = 1 << 30


def check_room(
    config: Config, model: Path, *, disk_free: int | None = None, memory_free: int | None = None
) -> None:
    """Raises EnvironmentLacks if checkpoints won't fit on the run's disk, or learner and CPU workers in
    memory.

    Counted: 16 bytes per trained parameter for a checkpoint (fp32 weights, two moments, export) times those
    kept plus the one being written; 16 bytes per trained parameter of a CPU learner, 4 per frozen one and per
    parameter of each CPU worker, and each worker's cache. With `learner.lora` the adapters alone are trained.
    """
    import torch

    trained = trained_count(config, model)
    check_disk(config, trained, free=disk_free)
    parameters = parameter_count(model) if config.learner.lora else trained
    frozen = parameters if config.learner.lora else 0
    if torch.cuda.is_available() or os.environ.get(
        "RAY_ADDRESS"
    ):  # on a cluster, learner and workers have nodes of their own
        return
    memory_free = psutil.virtual_memory().available if memory_free is None else memory_free
    workers = config.rollout.workers if isinstance(config.rollout.workers, int) else 1
    cache = config.rollout.kv_cache_gib or CPU_CACHE_GIB
    memory = 16 * trained + 4 * frozen + 4 * workers * parameters + workers * int((cache + 0.75) * GIB) + GIB
    if memory_free < memory:
        raise EnvironmentLacks(
            f"memory: {memory_free / GIB:.1f} GiB are free; about {memory / GIB:.1f} GiB are needed for "
            f"{parameters / 1e6:.0f} M parameters and "
            f"{workers} rollout workers (rollout.workers, rollout.kv_cache_gib)"
        )


def trained_count(config: Config, model: Path) -> int:
    """Parameters that a run trains: all of the model, or its adapters."""
    lora = config.learner.lora
    return adapter_count(model, lora) if lora else parameter_count(model)


def check_disk(config: Config, trained: int, *, free: int | None = None) -> None:
    """Raises EnvironmentLacks if the checkpoints that a run keeps won't fit on its disk (`check_room`).
    trained: as of `trained_count`."""
    folder = config.run_dir
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free if free is None else free
    kept = config.trainer.keep_checkpoints
    best = config.trainer.keep_best
    disk = 16 * trained * (kept + best + 1) + GIB // 4
    if free < disk:
        raise EnvironmentLacks(
            f"run.dir: {folder} has {free / GIB:.1f} GiB free; {disk / GIB:.1f} GiB are needed for "
            f"checkpoints of {trained / 1e6:.0f} M parameters: {kept} (trainer.keep_checkpoints), "
            f"{'the best (trainer.keep_best), ' if best else ''}and the one that is being written"
        )
