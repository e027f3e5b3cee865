"""Workers and learner ranks on one GPU: the share that each asks for, and how many GPUs they take together.
Arithmetic alone, without Ray.

rollout.share_gpus, one worker        .6 worker | .4 rank
the same with workers_per_gpu=2       .3666 worker | .3666 worker | .2668 rank
workers_per_gpu=2 without it          .5 worker | .5 worker
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from services.settings import RolloutSettings


def worker_share(settings: RolloutSettings) -> float:
    """GPUs that one worker asks for: so many that `workers_per_gpu` fit on one, and never one more. With
    `share_gpus` they fit beside one learner rank, which asks for the rest (`rank_share`)."""
    n = settings.workers_per_gpu
    if settings.share_gpus:
        return rounded_down((1 + 0.2 / n) / (n + 1))
    return rounded_down(1 / n) if n > 1 else settings.tensor_parallel


def rank_share(settings: RolloutSettings) -> float:
    """GPUs that one learner rank asks for."""
    if not settings.share_gpus:
        return 1.0
    return round(1 - settings.workers_per_gpu * worker_share(settings), 4)


def rounded_down(share: float) -> float:
    """To Ray's precision. Ray itself may round up, and six shares of .1667 are more than a GPU."""
    return math.floor(share * 10_000 + 1e-6) / 10_000


def together(settings: RolloutSettings, supply: Mapping[str, float]) -> int:
    """Workers that have one place of the cluster together: those of a GPU. 1 on a cluster without GPUs."""
    return settings.workers_per_gpu if supply.get("GPU", 0) > 0 else 1


def gpus_of(settings: RolloutSettings, workers: int, ranks: int) -> int:
    """GPUs that so many workers and learner ranks take."""
    of_workers = math.ceil(workers / settings.workers_per_gpu) * settings.tensor_parallel
    return max(of_workers, ranks) if settings.share_gpus else of_workers + ranks


def of_one_worker(settings: RolloutSettings) -> RolloutSettings:
    """The settings that a worker is given: its own part of the memory for rollouts."""
    memory = settings.gpu_memory_utilization / settings.workers_per_gpu
    return settings.model_copy(update={"gpu_memory_utilization": memory})
