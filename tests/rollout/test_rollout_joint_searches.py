"""A worker joins its searches once its retriever has answered often enough, and no trajectory suffers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from rollout_fakes import request, words
from rollout_search import search_server

from retriever_service import joining
from retriever_service.joining import GOOD_FIRST
from services.rollout.engines.base import Generation
from services.rollout.worker import worker as module
from services.rollout.worker.worker import RolloutWorker
from services.settings import RolloutSettings

LAB = words(names=200)


class Engine:
    """Searches for the question's last name, then answers."""

    async def generate(self, call):
        name = LAB.decode(call.token_ids).split()[3]
        text = (
            f"<search> {name} </search>" if call.request_id.endswith(".0") else f"<answer> {name} </answer>"
        )
        ids = LAB.encode(text)
        return Generation(ids, [-1.0] * len(ids), text, "stop", 0)

    def check(self):
        """Well."""

    async def close(self):
        """No process."""


@pytest.fixture
def search():
    with search_server() as state:
        state.echo = True
        yield state


@pytest.fixture
async def worker(monkeypatch, search):
    monkeypatch.setattr(joining, "WAIT_SECONDS", 60.0)  # a busy machine is no slow retriever

    async def start_engine(settings, model_path, seed):
        return Engine()

    monkeypatch.setattr(module, "start_engine", start_engine)
    monkeypatch.setattr(module, "make_receiver", lambda sync, model_path: SimpleNamespace())
    monkeypatch.setattr(module, "load_tokenizer", lambda path: LAB)
    settings = RolloutSettings(template="lab", max_obs_tokens=32, max_model_tokens=128)
    one = RolloutWorker(
        "w0", settings, model_path="m", retriever_url=search.url, retriever_timeout_seconds=60
    )
    await one.start()
    yield one
    await one.close()


async def roll(worker, first, count):
    """So many trajectories at the same time, each with a search of its own."""
    asked = [request(f"u{i}", text=f"what is n{i} ?") for i in range(first, first + count)]
    done = await asyncio.gather(*map(worker.rollout, asked))
    for i, trajectory in enumerate(done, first):
        search, answer = trajectory.actions
        assert (search.query, answer.text) == (f"n{i}", f"<answer> n{i} </answer>")
        assert search.documents == [f'"n{i}"\nborn n3 river n4'] and search.search_failures == 0
    return done


async def test_a_worker_joins_its_searches_after_as_many_good_ones_and_not_before(worker, search):
    await roll(worker, 0, GOOD_FIRST)
    assert search.requests == [1] * GOOD_FIRST
    search.requests.clear()
    await roll(worker, GOOD_FIRST, 30)
    assert sum(search.requests) == 30 and max(search.requests) > 1


async def test_a_retriever_that_refuses_joint_requests_harms_no_trajectory_and_is_spared_them(worker, search):
    await roll(worker, 0, GOOD_FIRST)
    search.joint_down = True
    search.requests.clear()
    await roll(worker, GOOD_FIRST, 30)
    # All that were in the joint requests were asked again, each alone.
    assert max(search.requests) > 1 and search.requests.count(1) == 30
    search.requests.clear()
    await roll(worker, 0, 20)
    assert search.requests == [1] * 20, "twice as many good ones come first now"
