"""A worker's states, with a scripted engine: weights, deadlines, draining, the turn barrier."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rollout_fakes import Hit, ScriptedEngine, request, words

from services.common.errors import EnvironmentLacks, UnspiralError
from services.contracts import WeightUpdate
from services.rollout.engines.base import GenerateCall, Generation
from services.rollout.errors import WorkerLostError, WorkerUnavailableError
from services.rollout.worker import worker as module
from services.rollout.worker.barrier import TurnBarrier
from services.rollout.worker.worker import RolloutWorker
from services.settings import RolloutSettings
from services.weight_sync import WeightSyncError

LAB = words()


class Engine(ScriptedEngine):
    """Writes one answer for ever; loads weights, fails, or dies as told."""

    def __init__(self):
        super().__init__(LAB, [])
        self.fail, self.dead, self.loaded, self.resets, self.hold = False, False, [], 0, asyncio.Event()
        self.hold.set()

    async def generate(self, call):
        await self.hold.wait()
        self.script.append("<answer> n1 </answer>")
        return await super().generate(call)

    async def generate_batch(self, calls):
        return [await self.generate(call) for call in calls]

    async def load_weights(self, path, version):
        assert sorted(p.name for p in path.iterdir()) == ["a.safetensors"], "deleted before it was loaded"
        if self.fail:
            raise UnspiralError("half of it")
        self.loaded.append(version)

    async def reset_prefix_cache(self):
        self.resets += 1

    def check(self):
        if self.dead:
            raise WorkerLostError("the engine is dead")

    async def close(self):
        self.closed = True


class Receiver:
    """Lays a folder out for each update, and knows whether it was removed."""

    def __init__(self, tmp: Path):
        self.tmp, self.refuse = tmp, False

    def receive(self, update):
        if self.refuse:
            raise WeightSyncError("not this model's")
        folder = self.tmp / f"v{update.version}"
        folder.mkdir()
        (folder / "a.safetensors").write_bytes(b"x")
        return folder

    def release(self, folder):
        shutil.rmtree(folder)


def parts(monkeypatch, tmp_path):
    """An engine and a receiver, which workers made from here on have."""
    engine, receiver = Engine(), Receiver(tmp_path)

    async def start_engine(settings, model_path, seed):
        return engine

    monkeypatch.setattr(module, "start_engine", start_engine)
    monkeypatch.setattr(module, "make_receiver", lambda sync, model_path: receiver)
    monkeypatch.setattr(module, "load_tokenizer", lambda path: LAB)
    return engine, receiver


@pytest.fixture
async def made(monkeypatch, tmp_path):
    engine, receiver = parts(monkeypatch, tmp_path)
    settings = RolloutSettings(
        template="lab", max_obs_tokens=32, max_model_tokens=128, trajectory_timeout_seconds=60.0
    )
    worker = RolloutWorker(
        "w7", settings, model_path="m", retriever_url="http://127.0.0.1:9", retriever_timeout_seconds=1
    )
    with pytest.raises(WorkerUnavailableError, match="w7 is not running"):
        await worker.rollout(request())
    await worker.start()
    yield worker, engine, receiver, tmp_path
    await worker.close()


def update(version):
    return WeightUpdate(version, "shared_memory", (), 0)


async def test_weights_are_deleted_after_the_load_and_versions_only_go_up(made):
    worker, engine, _, folder = made
    assert await worker.update_weights(update(0)) == 0, (
        "the first version may be the 0 that the worker was born with"
    )
    assert await worker.update_weights(update(4)) == 4
    assert list(folder.iterdir()) == []
    for version in (4, 3):
        with pytest.raises(WeightSyncError, match=f"w7 holds version 4 and was sent {version}"):
            await worker.update_weights(update(version))
    assert engine.loaded == [0, 4] and worker.info().policy_version == 4


async def test_a_half_loaded_worker_serves_nobody_until_a_whole_version_comes(made):
    worker, engine, _, folder = made
    await worker.update_weights(update(1))
    engine.fail = True
    with pytest.raises(UnspiralError):
        await worker.update_weights(update(2))
    assert list(folder.iterdir()) == []
    assert (worker.info().state, worker.info().policy_version) == ("failed", 1)
    for call in (worker.rollout(request()), worker.rollout_batch([request()]), worker.logprobs([[1, 2]])):
        with pytest.raises(WorkerUnavailableError, match="no whole version"):
            await call
    engine.fail = False
    assert await worker.update_weights(update(2)) == 2
    assert worker.info().state == "ready"
    assert (await worker.rollout(request())).worker == "w7"


async def test_weights_of_another_model_are_refused_before_the_engine_is_touched(made):
    worker, engine, receiver, _ = made
    receiver.refuse = True
    with pytest.raises(WeightSyncError, match="not this model's"):
        await worker.update_weights(update(1))
    assert (worker.info().state, engine.loaded) == ("ready", [])
    assert (await worker.rollout(request())).finish == "answer"


async def test_a_trajectory_past_its_deadline_is_ended_with_the_key_named(made):
    worker, engine, _, _ = made
    engine.hold.clear()
    worker._settings = worker._settings.model_copy(update={"trajectory_timeout_seconds": 0.3})
    with pytest.raises(TimeoutError, match=r"u0 on worker w7: .*rollout.trajectory_timeout_seconds=0\.3"):
        await worker.rollout(request())
    assert worker.info().outstanding_tokens == 0


async def hang(content, question):
    await asyncio.Event().wait()


async def test_a_tool_past_its_own_limit_is_named_and_not_the_trajectorys(monkeypatch, tmp_path):
    tokenizer = words(more=("<calc>", "</calc>"))
    engine, _ = parts(monkeypatch, tmp_path)
    monkeypatch.setattr(module, "load_tokenizer", lambda path: tokenizer)
    ids = tokenizer.encode("<calc> n1 </calc>")

    async def generate(call):
        return Generation(ids, [-1.0] * len(ids), "<calc> n1 </calc>", "stop", 0)

    engine.generate = generate
    settings = RolloutSettings(
        template="lab",
        max_model_tokens=128,
        tools={"calc": "test_rollout_worker:hang"},
        tool_timeout_seconds=0.05,
        trajectory_timeout_seconds=600,
    )
    worker = RolloutWorker(
        "w7", settings, model_path="m", retriever_url="http://127.0.0.1:9", retriever_timeout_seconds=1
    )
    await worker.start()
    with pytest.raises(TimeoutError) as e:
        await worker.rollout(request())
    assert str(e.value) == (
        "trajectory u0 on worker w7: rollout.tools.calc: no result within rollout.tool_timeout_seconds=0.05"
    )
    await worker.close()


async def test_draining_finishes_what_runs_and_takes_nothing_new(made):
    worker, engine, _, _ = made
    engine.hold.clear()
    running = asyncio.create_task(worker.rollout(request()))
    await asyncio.sleep(0.01)
    draining = asyncio.create_task(worker.drain())
    await asyncio.sleep(0.01)
    assert worker.info().state == "draining" and not draining.done()
    with pytest.raises(WorkerUnavailableError, match="draining"):
        await worker.rollout(request("u1"))
    engine.hold.set()
    await draining
    assert (await running).finish == "answer"


async def test_a_dead_engine_shows_in_the_next_ping(made):
    worker, engine, _, _ = made
    engine.dead = True
    with pytest.raises(WorkerLostError):
        worker.info()


async def test_a_batch_is_run_in_uid_order_from_an_empty_cache_and_returned_in_the_callers(made):
    worker, engine, _, _ = made
    batch = [request(f"u{i}", text=f"what is n{i} ?") for i in (3, 1, 2)]
    done = await worker.rollout_batch(batch)
    assert [t.uid for t in done] == ["u3", "u1", "u2"]
    assert [LAB.decode(p).split()[3] for p in engine.prompts] == ["n1", "n2", "n3"]
    assert engine.resets == 1


async def test_closing_twice_is_harmless(made):
    worker, engine, _, _ = made
    await worker.close()
    await worker.close()
    assert engine.closed
    with pytest.raises(WorkerUnavailableError):
        await worker.rollout(request())


async def test_closing_while_the_engine_starts_closes_the_engine_too(made, monkeypatch):
    _, engine, _, _ = made
    begun = asyncio.Event()
    up = asyncio.Event()

    async def start_engine(settings, model_path, seed):
        begun.set()
        await up.wait()
        return engine

    monkeypatch.setattr(module, "start_engine", start_engine)
    for last in ("async_llm", "llm_engine"):  # a test before this one may have imported them
        monkeypatch.delitem(sys.modules, f"vllm.v1.engine.{last}", raising=False)
    settings = RolloutSettings(template="lab", max_obs_tokens=32, max_model_tokens=128)
    worker = RolloutWorker(
        "w8", settings, model_path="m", retriever_url="http://127.0.0.1:9", retriever_timeout_seconds=1
    )
    starting = asyncio.create_task(worker.start())
    await begun.wait()
    assert worker.info().waits_for == "importing vLLM"
    vllms = SimpleNamespace(AsyncLLM=object)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.async_llm", vllms)
    assert worker.info().waits_for == "loading the model into vLLM"
    await worker.close()
    assert worker.info().waits_for == ""
    up.set()
    with pytest.raises(WorkerUnavailableError, match="w8 was closed while its engine started"):
        await starting
    assert engine.closed


async def test_the_barrier_waits_for_all_that_are_left_and_keeps_their_order():
    batches = []

    class Recorder:
        async def generate_batch(self, calls: list[GenerateCall]):
            batches.append([c.request_id for c in calls])
            if "bad" in batches[-1]:
                raise WorkerLostError("gone")
            return [Generation([1], [-1.0], "", "stop", 0) for _ in calls]

    def ask(index, name):
        call = barrier.member(index).generate(GenerateCall(name, [1], 1, 1.0, None, ()))
        return asyncio.create_task(call)

    barrier = TurnBarrier(Recorder(), 3)
    c, a = ask(2, "c"), ask(0, "a")
    await asyncio.sleep(0.02)
    assert batches == []
    barrier.leave(1)
    await asyncio.gather(a, c)
    assert batches == [["a", "c"]]
    ends = await asyncio.gather(ask(0, "bad"), ask(2, "x"), return_exceptions=True)
    assert all(isinstance(e, WorkerLostError) for e in ends)


async def test_a_missing_engine_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        EnvironmentLacks,
        match=r"rollout\.engine=vllm: vllm is not installed; in a checkout of Unspiral: pip install",
    ) as e:
        await module.start_engine(RolloutSettings(), "m", 0)
    assert e.value.exit_code == 3


async def test_an_observation_of_a_slow_search_belongs_to_its_own_trajectory(made):
    """Two trajectories, the first one's search answered last."""
    worker, engine, _, _ = made
    release = asyncio.Event()

    async def search(query):
        if query == "n1":
            await release.wait()
        release.set()
        return [Hit(query, f'"{query}"\nriver {query}')]

    async def generate(call):
        text = (
            f"<search> {LAB.decode(call.token_ids).split()[3]} </search>"
            if call.request_id.endswith(".0")
            else "<answer> n0 </answer>"
        )
        ids = LAB.encode(text)
        return Generation(ids, [-1.0] * len(ids), text, "stop", 0)

    engine.generate = generate
    worker._search = lambda url: search
    pair = [request("a", text="what is n1 ?"), request("b", text="what is n2 ?")]
    done = await asyncio.gather(*map(worker.rollout, pair))
    assert [t.actions[0].document_ids for t in done] == [["n1"], ["n2"]]
    assert [t.segments[1].text for t in done] == [
        f"<information> <doc> n{i} river n{i} </information>" for i in (1, 2)
    ]
