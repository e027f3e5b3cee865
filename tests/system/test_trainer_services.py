"""A run's start: room on the cluster, and the services, which start side by side."""

import asyncio
import gc
import threading
import time
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest
from bare_start import bare_start

from services.common.errors import EnvironmentLacks, UserError
from trainer.config.schema import parse_config
from trainer.session import run_services, startup

BASE = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}


class Ranks:
    """Of a learner."""

    def demand(self):
        return {"CPU": 1}


def rooms(monkeypatch, *supplies, address):
    """Wait for room of two workers and a rank, in a cluster that has one supply after the other; how often it
    was asked."""
    left, asked = list(supplies), []

    def resources():
        asked.append(1)
        return {"CPU": left.pop(0) if len(left) > 1 else left[0]}

    monkeypatch.setattr(startup.ray, "cluster_resources", resources)
    monkeypatch.setattr(startup.placement, "SCHEDULE_SECONDS", 1.2)
    monkeypatch.setattr(startup, "LOCAL_SECONDS", 0.0)
    monkeypatch.setenv("RAY_ADDRESS", address)
    config = parse_config(BASE | {"retriever": {"url": "http://x"}, "rollout": {"workers": 2}})
    asyncio.run(startup.wait_for_room(config, Ranks()))
    return len(asked)


def test_nodes_of_a_cluster_may_still_be_joining(monkeypatch):
    assert rooms(monkeypatch, 1, 2, 3, address="127.0.0.1:6379") == 3


@pytest.mark.parametrize(("address", "seconds"), [("127.0.0.1:6379", "1.2"), ("", "0")])
def test_a_cluster_that_stays_too_small_is_one_line_and_a_local_one_is_not_waited_for(
    monkeypatch, address, seconds
):
    said = rf"ask for CPU 3; the cluster has CPU 2, also after {seconds} s"
    with pytest.raises(EnvironmentLacks, match=said):
        rooms(monkeypatch, 2, address=address)


def test_a_local_ray_without_room_is_told_before_anything_is_indexed_or_started(monkeypatch):
    async def start(*arguments, **options):
        raise AssertionError("a service was started")

    start_system = bare_start(monkeypatch, resources={"CPU": 2}, learner=Ranks(), start_services=start)
    config = parse_config(BASE | {"retriever": {"url": "http://x"}, "rollout": {"workers": 2}})

    async def run():
        async with start_system(config):
            raise AssertionError("it started")

    with pytest.raises(EnvironmentLacks, match="ask for CPU 3; the cluster has CPU 2"):
        asyncio.run(run())


def test_records_are_flushed_before_workers_and_retrievers_are_ended(monkeypatch):
    """A worker may hang in its end until the process leaves without another look."""
    ended = []
    said = []

    class Learner(Ranks):
        where = (SimpleNamespace(activations="learner: activations are kept"),)

        def start(self):
            pass

        def close(self):
            ended.append("learner")

    class Pool:
        async def start(self):
            pass

        def workers(self):
            return []

        async def close(self):
            ended.append("workers")

    async def start_services(config, stack, say, *, records):
        stack.callback(ended.append, "retrievers")
        records.callback(ended.append, "records")
        return run_services.Services("http://x", None, SimpleNamespace())

    start_system = bare_start(
        monkeypatch,
        resources={"CPU": 8},
        learner=Learner(),
        start_services=start_services,
        pool=Pool(),
        leave_ray=lambda: ended.append("Ray"),
    )

    async def run():
        config = parse_config(BASE | {"retriever": {"url": "http://x"}})
        async with start_system(config, said.append):
            assert ended == []

    asyncio.run(run())
    assert ended == ["learner", "records", "workers", "retrievers", "Ray"]
    assert said[-1] == "learner: activations are kept"


class Started:
    """A service."""

    url = "http://127.0.0.1:9"

    def __init__(self, name, log):
        self.name, self.log = name, log

    def stop(self):
        self.log.append(f"{self.name} stopped")


def services(monkeypatch, tmp_path, log, *, fails=None, say=lambda text: None):
    """Start both retrievers and the likelihood service, each in .3 s, or fail at once."""

    all_begun = threading.Barrier(3)

    def start(name):
        log.append(f"{name} begun")
        all_begun.wait(60)
        if name == fails:
            raise EnvironmentLacks(f"{name}: did not start: bad index")
        time.sleep(0.3)
        log.append(f"{name} started")
        return Started(name, log)

    async def ready(self, *arguments, **options):
        pass

    monkeypatch.setattr(
        run_services, "start_retriever", lambda index, *, name, **_: start(name.split("-")[-1])
    )
    monkeypatch.setattr(run_services, "start_likelihood", lambda store, **_: start("likelihood"))
    monkeypatch.setattr(run_services.RetrieverClient, "wait_ready", ready)
    config = parse_config(
        BASE
        | {
            "run": {"dir": str(tmp_path), "name": "r"},
            "retriever": {"index": "i"},
            "evaluation": {"retriever": {"index": "j"}},
        }
    )

    async def run():
        async with AsyncExitStack() as stack, AsyncExitStack() as records:
            return await run_services.start_services(config, stack, say, records=records)

    return asyncio.run(run())


NAMES = ("eval_retriever", "likelihood", "retriever")


def test_services_start_at_the_same_time_and_are_stopped_at_the_end(monkeypatch, tmp_path):
    log = []
    found = services(monkeypatch, tmp_path, log)
    assert (found.retriever_url, found.eval_retriever_url) == (Started.url, Started.url)
    for place, what in enumerate(("begun", "started", "stopped")):
        assert sorted(log[3 * place : 3 * place + 3]) == [f"{name} {what}" for name in NAMES]


def test_the_address_of_the_live_page_is_said_once_it_is_served(monkeypatch, tmp_path):
    log = []
    services(monkeypatch, tmp_path, log, say=log.append)
    line = f"live page: {Started.url}/#runs=r"
    assert log.count(line) == 1
    assert log.index("likelihood started") < log.index(line) < log.index("likelihood stopped")


@pytest.mark.parametrize("fails", NAMES)
def test_the_error_of_a_service_is_told_as_it_is_and_the_others_are_stopped(monkeypatch, tmp_path, fails):
    log = []
    with pytest.raises(EnvironmentLacks, match=rf"^{fails}: did not start: bad index$") as e:
        services(monkeypatch, tmp_path, log, fails=fails)
    assert e.value.exit_code == 3
    started = sorted(line.split()[0] for line in log if line.endswith("started"))
    assert started == sorted(line.split()[0] for line in log if line.endswith("stopped"))
    assert len(started) == 2


def test_a_corpus_that_cannot_be_indexed_is_told_before_another_is_indexed(monkeypatch, tmp_path):
    """A thread that indexes cannot be stopped, and would be waited for."""
    indexed = []

    def index(corpus, folder, **options):
        indexed.append(folder.name)
        raise UserError(f"{corpus}, line 3: not JSON")

    monkeypatch.setattr(run_services, "index_corpus", index)
    monkeypatch.setattr(run_services.models, "resolve_file", lambda name: name)
    run = {"run": {"dir": str(tmp_path), "name": "r"}}
    corpora = {"retriever": {"corpus": "bad"}, "evaluation": {"retriever": {"corpus": "large"}}}

    async def start():
        async with AsyncExitStack() as stack:
            await run_services.start_services(parse_config(BASE | run | corpora), stack, lambda text: None)

    with pytest.raises(UserError, match=r"^bad, line 3: not JSON$"):
        asyncio.run(start())
    assert indexed == ["retriever_index"]


def test_a_start_that_is_cut_short_waits_a_bounded_time_for_a_service(monkeypatch):
    monkeypatch.setattr(run_services, "CANCEL_SECONDS", 0.05)
    over = threading.Event()
    log = []

    def start():
        over.wait(60)
        return Started("slow", log)

    async def cut(ends_after=None):
        async with AsyncExitStack() as stack:
            starting = asyncio.create_task(run_services._started(start, stack))
            await asyncio.sleep(0.01)
            starting.cancel()
            if ends_after is not None:
                asyncio.get_running_loop().call_later(ends_after, over.set)
            with pytest.raises(asyncio.CancelledError):
                await starting
        over.set()

    asyncio.run(cut())
    assert log == []  # it is left behind
    over.clear()
    monkeypatch.setattr(run_services, "CANCEL_SECONDS", 60.0)
    asyncio.run(cut(ends_after=0.02))
    assert log == ["slow stopped"]


def test_a_start_that_is_left_behind_and_fails_says_nothing(monkeypatch, caplog):
    monkeypatch.setattr(run_services, "CANCEL_SECONDS", 0.0)
    over = threading.Event()

    def start():
        over.wait(30)
        raise EnvironmentLacks("the actor never ran")

    async def cut():
        async with AsyncExitStack() as stack:
            starting = asyncio.create_task(run_services._started(start, stack))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
        over.set()

    asyncio.run(cut())
    gc.collect()
    assert caplog.records == []
