"""Whether workers and learner ranks may have the places on GPUs that a configuration gives them."""

from __future__ import annotations

from services.settings import RolloutSettings


def fill_in_workers(rollout: RolloutSettings) -> None:
    """`rollout.workers` of its own accord: those of one GPU. It is not counted among the keys that the user
    has set."""
    if "workers" not in rollout.model_fields_set:
        rollout.__dict__["workers"] = rollout.workers_per_gpu


def check_places(rollout: RolloutSettings, *, ranks: int, backend: str) -> None:
    """ranks: `learner.ranks`; backend: `weight_sync.backend`. Raises ValueError with one line."""
    if rollout.workers_per_gpu > 1:
        _check_together(rollout, backend)
    if rollout.share_gpus:
        _check_turns(rollout, ranks, backend)


def _check_together(rollout: RolloutSettings, backend: str) -> None:
    n = rollout.workers_per_gpu
    if rollout.tensor_parallel > 1:
        raise ValueError(
            f"rollout.workers_per_gpu={n} with rollout.tensor_parallel={rollout.tensor_parallel}: a GPU has "
            "several workers, or a worker several GPUs. Set one of them to 1"
        )
    if backend not in ("auto", "shared_memory"):
        raise ValueError(
            f"weight_sync.backend={backend} does not work with rollout.workers_per_gpu={n}: two ranks of "
            "NCCL cannot share a GPU, and gloo is for CPUs. Set it to auto or shared_memory"
        )
    if rollout.workers != "all" and rollout.workers < n:
        raise ValueError(
            f"rollout.workers={rollout.workers} is less than rollout.workers_per_gpu={n}: each worker would "
            f"have 1/{n} of a GPU's memory, and the rest lie idle. Set rollout.workers, which counts them on "
            f"all GPUs together, to {n} or more, or to all"
        )


def _check_turns(rollout: RolloutSettings, ranks: int, backend: str) -> None:
    if backend not in ("auto", "shared_memory"):
        raise ValueError(
            f"weight_sync.backend={backend} does not work with "
            "rollout.share_gpus=true: two ranks of NCCL cannot share "
            "a GPU. Set it to auto or shared_memory"
        )
    if rollout.max_staleness or rollout.tensor_parallel > 1:
        raise ValueError(
            "rollout.share_gpus=true needs rollout.max_staleness=0 and rollout.tensor_parallel=1"
        )
    if rollout.workers == "all" or rollout.workers < ranks:
        raise ValueError(
            "rollout.share_gpus=true needs a number of rollout.workers, at least "
            f"learner.ranks={ranks}: each rank shares a worker's GPU"
        )
    n = rollout.workers_per_gpu
    # Ray would put two ranks on one GPU that is not full.
    if rollout.workers < ranks * n:
        raise ValueError(
            f"rollout.share_gpus=true with rollout.workers_per_gpu={n} needs rollout.workers of at least "
            f"{ranks * n}, {n} for each of learner.ranks={ranks}: each rank shares the GPU of {n} workers"
        )
