"""How many GPUs a configuration needs, and whether this machine has them: told before Ray starts."""

from __future__ import annotations

import os

from services.common.counting import counted
from services.common.errors import EnvironmentLacks
from services.common.loading.extras import installed
from services.rollout.pool.shares import gpus_of
from trainer.config.schema import Config

CPU_INSTEAD = "unspiral init --gpus 0 writes a configuration for a CPU"


def asked_by(config: Config) -> list[str]:
    """The settings that have no meaning without a GPU, as `rollout.share_gpus=true` (with engine
    `transformers` turns, and workers that share a device, work on a CPU too). Without any a run takes what is
    there."""
    rollout = config.rollout
    asked = {
        "rollout.share_gpus=true": rollout.share_gpus and rollout.engine == "vllm",
        f"rollout.workers_per_gpu={rollout.workers_per_gpu}": rollout.workers_per_gpu > 1
        and rollout.engine == "vllm",
        f"rollout.tensor_parallel={rollout.tensor_parallel}": rollout.tensor_parallel > 1,
        "weight_sync.backend=nccl": config.weight_sync.backend == "nccl",
    }
    return [setting for setting, is_asked in asked.items() if is_asked]


def needed(config: Config) -> int:
    """GPUs of a run that computes on GPUs: one for each learner rank and `rollout.tensor_parallel` for each
    worker (or one for every `rollout.workers_per_gpu`), or the same ones in turns."""
    workers = 1 if config.rollout.workers == "all" else config.rollout.workers
    return gpus_of(config.rollout, workers, config.learner.ranks)


def lack_of_gpus(config: Config, there: int) -> tuple[str, str] | None:
    """What is missing on a machine with so many GPUs, and what to do; None where a run can start."""
    wanted = needed(config)
    if not there and (asked := asked_by(config)):
        return (
            f"{', '.join(asked)}: needs {counted(wanted, 'GPU')}, and this machine has none",
            CPU_INSTEAD,
        )
    if 0 < there < wanted:
        each = config.rollout.workers_per_gpu
        crowd = f", rollout.workers_per_gpu={each}" if each > 1 else ""
        return (
            f"learner.ranks={config.learner.ranks}, rollout.workers={config.rollout.workers}{crowd}: "
            f"{counted(wanted, 'GPU is', 'GPUs are')} needed, and this machine has {there}",
            "ask for fewer workers and ranks, or set rollout.share_gpus=true",
        )
    return None


def gpus_here() -> int:
    """GPUs of this machine that PyTorch can use; 0 where it is not installed."""
    if installed("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def check_gpus_here(config: Config) -> None:
    """Raises EnvironmentLacks where a Ray that starts here would have too few. A cluster that is joined
    answers for itself."""
    # Without PyTorch no GPU can be seen: the import of the trainer says what is missing.
    if os.environ.get("RAY_ADDRESS") or installed("torch") is None:
        return
    if lack := lack_of_gpus(config, gpus_here()):
        raise EnvironmentLacks("; ".join(lack))
