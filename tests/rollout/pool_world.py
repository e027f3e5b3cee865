"""A rollout pool on a local Ray, for tests: real actors, real engines, real searches.

The policy searches once and then answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from rollout_fakes import request
from rollout_models import reference_logprobs, searcher

from services.contracts import TrajectoryRequest
from services.rollout.pool.pool import RolloutPool
from services.settings import RolloutSettings, WeightSyncSettings

ROWS = [[1, 13, 14, 30, 17, 6, 25, 7, 8, 12, 9, 6, 26], [1, 25, 9, 10, 27]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> SimpleNamespace:
    """A model that searches once and then answers; its folder, and a folder for other weights of it."""
    tmp = tmp_path_factory.mktemp("policy")
    return SimpleNamespace(path=str(tmp / "m"), model=searcher(tmp / "m"), tmp=tmp)


def requests(name: str, n: int, group: int = 5) -> list[TrajectoryRequest]:
    return [request(f"{name}-{i:02d}", group=f"{name}-g{i // group}", seed=i) for i in range(n)]


@asynccontextmanager
async def pool(
    path: str | Path,
    retriever_url: str,
    *,
    retriever_timeout: float = 20,
    sync: WeightSyncSettings | None = None,
    **changes,
) -> AsyncIterator[RolloutPool]:
    """A pool of one transformers worker, unless `changes` (settings of `rollout`) say otherwise.

    `pool.events` holds its events. It is closed on leaving.
    """
    small = {
        "engine": "transformers",
        "workers": 1,
        "template": "lab",
        "kv_cache_gib": 0.1,
        "max_turns": 2,
        "max_obs_tokens": 32,
        "max_response_tokens": 16,
        "max_model_tokens": 128,
        "start_timeout_seconds": 800,
    }
    events: list[dict] = []
    made = RolloutPool(
        RolloutSettings(**small | changes),
        model_path=str(path),
        retriever_url=retriever_url,
        retriever_timeout_seconds=retriever_timeout,
        on_event=events.append,
        sync=sync or WeightSyncSettings(timeout_seconds=60),
    )
    made.events = events
    try:
        yield made
    finally:
        await made.close()


def events_of(made: RolloutPool, kind: str) -> list[dict]:
    return [e for e in made.events if e["event"] == kind]


def in_state(made: RolloutPool, state: str) -> list:
    return [w for w in made.workers() if w.state == state]


async def until(condition: Callable[[], object], seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.02)


async def difference(made: RolloutPool, worker: str, model, temperature: float = 1.0, rows=ROWS) -> float:
    """The largest |log-prob of the worker, over its own RPC - log-prob by transformers|."""
    got = await made.logprobs(worker, rows, temperature)
    expected = reference_logprobs(model, rows, temperature)
    return max(abs(a - b) for r, s in zip(got, expected, strict=True) for a, b in zip(r, s, strict=True))
