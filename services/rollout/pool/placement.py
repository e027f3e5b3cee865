"""Resources of rollout workers: demand of one, number that fits, and the message when none does."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from services.common.counting import counted
from services.common.deadlines import within
from services.common.errors import EnvironmentLacks
from services.rollout.engines.vllm_engine import ENVIRONMENT
from services.rollout.pool.shares import gpus_of, of_one_worker, rounded_down, together, worker_share
from services.rollout.pool.worker_handle import RayWorkerHandle, WorkerHandle
from services.rollout.worker.worker import RolloutWorker
from services.settings import RolloutSettings, WeightSyncSettings
from services.weight_sync.base import ENVIRONMENT_PREFIXES

RESOURCE = "rollout"
"""Ray resource that marks nodes for rollout workers; one worker takes one, or with
`rollout.workers_per_gpu=N` on GPUs all N of one GPU together."""
SCHEDULE_SECONDS = 20.0
"""Longest wait for the resources of one worker."""
PASSED_ON = (
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_USE_FLASHINFER_SAMPLER",
)
"""Variables of the driver that workers see too. An allow-list: secrets never enter Ray's runtime
environment."""

_NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""With this Ray leaves it to each process to find its own GPU, and ours take the first that they see."""


def demand(settings: RolloutSettings, supply: dict[str, float]) -> dict[str, float]:
    """Resources that one worker asks of Ray: `rollout` where the cluster has that resource, GPUs where it has
    any; otherwise one CPU."""
    wants: dict[str, float] = {}
    if RESOURCE in supply:
        wants[RESOURCE] = rounded_down(1 / together(settings, supply))
    if supply.get("GPU", 0) > 0 or settings.tensor_parallel > 1:
        wants["GPU"] = worker_share(settings)
    return wants or {"CPU": 1}


def count(settings: RolloutSettings, supply: dict[str, float], learner_gpus: int = 0) -> int:
    """Number of workers wanted: as configured, or for "all" as many as the cluster's `rollout` resource (or
    the GPUs that the learner leaves) allows."""
    if settings.workers != "all":
        return settings.workers
    if RESOURCE in supply:
        return int(supply[RESOURCE]) * together(settings, supply)
    gpus = int(supply.get("GPU", 0)) - learner_gpus
    return max(1, gpus // settings.tensor_parallel) * together(settings, supply)


def check_gpus(settings: RolloutSettings, ranks: int, supply: dict[str, float]) -> None:
    """Raises EnvironmentLacks where learner ranks and workers do not all get their place on a GPU: two ranks
    of NCCL cannot share one."""
    gpus = int(supply.get("GPU", 0))
    if not gpus:
        return
    if gpus > 1 and os.environ.get(_NOSET, "0") not in ("", "0", "false", "False"):
        raise EnvironmentLacks(
            f"{_NOSET} is set: every worker and learner rank would land on the first GPU. Unset it"
        )
    workers = count(settings, supply, 0 if settings.share_gpus else ranks)
    each = settings.workers_per_gpu
    wanted = gpus_of(settings, workers, ranks)
    if wanted <= gpus:
        return
    room = max(0, gpus - (0 if settings.share_gpus else ranks)) * each
    crowd = f" (rollout.workers_per_gpu={each})" if each > 1 else ""
    has = f"the cluster has {gpus}" + (f", with room for {counted(room, 'worker')}" if crowd else "")
    if settings.share_gpus:
        raise EnvironmentLacks(
            f"rollout.share_gpus=true with rollout.workers={settings.workers}{crowd} and "
            f"learner.ranks={ranks} needs {wanted} GPUs; {has}"
        )
    of_workers = crowd or f" (rollout.tensor_parallel={settings.tensor_parallel})"
    one_each = "" if crowd else ", one for each"
    raise EnvironmentLacks(
        f"learner.ranks={ranks} and rollout.workers={settings.workers}{of_workers} need {wanted} GPUs"
        f"{one_each}; {has}. Ask for fewer, or set rollout.share_gpus=true"
    )


async def reserve(settings: RolloutSettings) -> PlacementGroup:
    """Hold the resources of one worker. Raises EnvironmentLacks after SCHEDULE_SECONDS (or the start
    timeout, if shorter)."""
    # A placement group and not the actor's own demand: an actor without room waits in silence, and this can
    # be waited for, and given back.
    group = ray.util.placement_group([demand(settings, ray.cluster_resources())])
    limit = min(SCHEDULE_SECONDS, settings.start_timeout_seconds)
    with contextlib.ExitStack() as undo:
        undo.callback(release, group)

        def late() -> Exception:
            return EnvironmentLacks(f"no room for a rollout worker after {limit:.0f} s: {describe(settings)}")

        async with within(limit, late):
            await asyncio.wrap_future(group.ready().future())
        undo.pop_all()
    return group


def release(group: PlacementGroup) -> None:
    """Give the resources back; Ray ends processes that still run on them."""
    ray.util.remove_placement_group(group)


@dataclass(frozen=True)
class WorkerArguments:
    """Arguments that all workers of a pool share."""

    model_path: str
    retriever_url: str
    retriever_timeout_seconds: float
    sync: WeightSyncSettings


def create_worker(
    id: str, settings: RolloutSettings, group: PlacementGroup, arguments: WorkerArguments
) -> WorkerHandle:
    """Ask Ray for a worker on reserved resources; returns at once."""
    wants = group.bundle_specs[0]
    variables = dict(ENVIRONMENT) | {
        name: os.environ[name] for name in (*ENVIRONMENT, *PASSED_ON) if name in os.environ
    }
    variables |= {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT_PREFIXES)}
    # A seed of its own: two engines with the same seed would draw the same noise.
    seed = int.from_bytes(hashlib.blake2b(id.encode(), digest_size=4).digest(), "big") >> 1
    actor = ray.remote(RolloutWorker).options(
        num_cpus=wants.get("CPU", 0),
        num_gpus=wants.get("GPU", 0),
        resources={name: n for name, n in wants.items() if name not in ("CPU", "GPU")},
        scheduling_strategy=PlacementGroupSchedulingStrategy(group),
        max_restarts=0,  # a successor is a new worker, which must be given the current weights first
        max_concurrency=10_000,  # each trajectory is a call of its own, and pings must get through
        runtime_env={"env_vars": variables},
    )
    handle = actor.remote(
        id,
        of_one_worker(settings),
        model_path=arguments.model_path,
        retriever_url=arguments.retriever_url,
        retriever_timeout_seconds=arguments.retriever_timeout_seconds,
        sync=arguments.sync,
        seed=seed,
    )
    return RayWorkerHandle(id, handle, group)


def describe(settings: RolloutSettings) -> str:
    """Demand against supply, on one line."""
    supply = ray.cluster_resources()
    free = ray.available_resources()
    wants = demand(settings, supply)
    asked = ", ".join(f"{name} {n:g}" for name, n in wants.items())
    names = sorted({*wants, "CPU", "GPU"})
    has = ", ".join(f"{name} {free.get(name, 0):g} free of {supply.get(name, 0):g}" for name in names)
    return f"each of rollout.workers={settings.workers} asks for {asked}; the cluster has {has}"


def lacking(
    settings: RolloutSettings, workers: int, supply: dict[str, float], held: Mapping[str, float]
) -> str | None:
    """Demand of so many workers against supply, on one line, where the whole cluster could not hold them
    beside what the run itself holds (its learner)."""
    wants = {name: n * workers for name, n in demand(settings, supply).items()}
    # With `share_gpus` workers leave a part of each GPU to a rank: many such parts are no place for a worker.
    places = int(supply.get("GPU", 0)) * settings.workers_per_gpu
    crowded = settings.share_gpus and "GPU" in wants and workers > places
    # Shares of GPUs are sums of floats.
    fit = all(n + held.get(name, 0) <= supply.get(name, 0) + 1e-6 for name, n in wants.items())
    if fit and not crowded:
        return None
    asked = ", ".join(f"{name} {n:g}" for name, n in wants.items())
    has = ", ".join(f"{name} {supply.get(name, 0):g}" for name in wants)
    taken = ", ".join(f"{name} {held[name]:g}" for name in wants if held.get(name))
    beside = f", of which the learner has {taken}" if taken else ""
    if crowded:
        beside += f", with room for {counted(places, 'worker')}"
    return f"{workers} rollout workers ask for {asked}; the cluster has {has}{beside}"
