"""The pool's book-keeping where workers are lost at once, leave, or lack weights; without Ray: what a worker
answers is written here."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace

import pytest
from ray.exceptions import RayError
from rollout_fakes import ScriptedWorker
from scripted_pool import member, pool_of, requests, samples, trajectory, until

from services.common.errors import EnvironmentLacks
from services.contracts import WeightUpdate, WorkerInfo
from services.rollout.errors import WorkerLostError
from services.rollout.pool import membership, placement
from services.rollout.pool.pool import RolloutPool
from services.settings import RolloutSettings
from services.weight_sync import GroupBrokenError
from services.worker_state import WorkerState


async def test_workers_lost_at_the_same_moment_lose_no_trajectory():
    cut = asyncio.Event()

    async def dies(method, *args):
        await cut.wait()
        raise WorkerLostError("the node is gone")

    async def late(method, *args):
        await cut.wait()
        return trajectory(args[0])

    pool = pool_of(member(0, dies), member(1, dies), member(2, late))
    batch = asyncio.create_task(pool.rollout(requests(6)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    cut.set()
    done = await asyncio.wait_for(batch, 60)
    assert [t.uid for t in done] == [f"u{i}" for i in range(6)]
    assert sorted(e["worker"] for e in pool.events if e["event"] == "worker_lost") == ["w0.1", "w1.1"]


async def test_a_worker_cancelled_before_its_first_step_gives_the_trajectory_back():
    idle = member(0, samples)
    pool = pool_of(idle, member(1, samples))
    batch = asyncio.create_task(pool.rollout(requests(4)))
    await asyncio.sleep(0)  # handed out, and not begun
    pool._roster.lose(idle, WorkerLostError("no answer"))
    done = await asyncio.wait_for(batch, 60)
    assert len(done) == 4 and not idle.jobs


@pytest.mark.parametrize(
    ("target", "no_room", "hope"), [(2, {1}, True), (1, {1, 2, 3}, True), (2, {0, 1}, False), (1, {0}, False)]
)
async def test_a_slot_without_a_worker_is_hope_unless_the_cluster_has_no_room_for_it(
    monkeypatch, target, no_room, hope
):
    monkeypatch.setattr(placement, "describe", lambda settings: "each asks for GPU 1; the cluster has none")
    last = member(0, samples)
    pool = pool_of(last, target=target)
    book = pool._roster
    book.no_room = no_room
    book.lose(last, WorkerLostError("killed"))
    if hope:
        book.raise_if_no_worker_can_serve()
        return
    with pytest.raises(EnvironmentLacks, match="no room for another"):
        book.raise_if_no_worker_can_serve()


async def test_half_written_workers_may_hope_while_a_version_is_to_be_sent_again():
    pool = pool_of(member(0, samples, state="failed"))
    book = pool._roster
    with pytest.raises(EnvironmentLacks, match="the last sync failed on all of them"):
        book.raise_if_no_worker_can_serve()
    pool._delivery._settle(
        WeightUpdate(1, "gloo", None, 0), list(book.members.values()), {}
    )  # nothing failed: no reason to wait
    with pytest.raises(EnvironmentLacks):
        book.raise_if_no_worker_can_serve()
    with pytest.raises(GroupBrokenError):
        survivor = book.members[0]
        pool._delivery._settle(
            WeightUpdate(2, "gloo", None, 0), [survivor], {survivor: GroupBrokenError("x")}
        )
    book.raise_if_no_worker_can_serve()
    batch = asyncio.create_task(pool.rollout(requests(2)))
    await asyncio.sleep(0.05)
    assert not batch.done()
    survivor.state, survivor.version = WorkerState.READY, book.version
    pool._dispatch()
    assert len(await asyncio.wait_for(batch, 60)) == 2


async def test_from_the_call_on_a_drained_worker_is_no_longer_counted_on():
    pool = pool_of(member(0, samples), member(1, samples))
    leaving = pool.drain("w0.1")
    assert pool.target == 1 and [w.state for w in pool.workers()] == ["draining", "ready"]
    again = pool.drain("w0.1")
    assert pool.target == 1
    await asyncio.gather(leaving, again)
    assert [w.id for w in pool.workers()] == ["w1.1"]


async def test_a_worker_that_hangs_while_it_leaves_is_found_out_and_its_trajectory_runs_elsewhere(
    monkeypatch,
):
    monkeypatch.setattr(membership, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(membership, "HEARTBEAT_SECONDS", 0.05)

    async def hangs(method, *args):
        await asyncio.sleep(600)

    async def answers(method, *args):
        return (
            WorkerInfo("w1.1", 0, "here", 0, state="ready")
            if method == "info"
            else await samples(method, *args)
        )

    stuck = member(0, hangs)
    pool = pool_of(stuck)
    batch = asyncio.create_task(pool.rollout(requests(1)))
    await until(lambda: stuck.worker.calls)
    book = pool._roster
    book.members[1], book.target = member(1, answers), 2
    leaving = asyncio.create_task(pool.drain("w0.1"))
    book.members[0], book.target = book.members.pop(1), 1
    book.members[0].slot = 0
    watch = asyncio.create_task(pool._membership._watch())
    try:
        assert len(await asyncio.wait_for(batch, 60)) == 1
        assert [e["worker"] for e in pool.events if e["event"] == "worker_lost"] == ["w0.1"]
        await asyncio.wait_for(leaving, 60)
    finally:
        watch.cancel()


async def test_a_look_that_fails_is_not_the_last(monkeypatch):
    monkeypatch.setattr(membership, "HEARTBEAT_SECONDS", 0.01)

    async def answers(method, *args):
        return WorkerInfo("w0.1", 0, "here", 0, state="ready")

    pool = pool_of(member(0, answers))
    book, looks = pool._membership, []

    def room():
        looks.append(1)
        if len(looks) < 3:
            raise ConnectionError("Ray's head does not answer")
        return 1

    monkeypatch.setattr(book, "_room", room)
    book.follows_cluster = True
    watch = asyncio.create_task(pool._membership._watch())
    try:
        await until(lambda: len(looks) > 4 and pool._roster.members[0].worker.calls)
        assert not watch.done()
    finally:
        watch.cancel()


async def test_a_worker_that_cannot_even_be_called_is_ended_with_a_note():
    async def unreachable(method, *args):
        raise RayError("the actor's handle is of no use")

    gone = member(0, unreachable)
    pool = pool_of(gone)
    await pool.close()
    assert [e["event"] for e in pool.events] == ["worker_close_failed"] and gone.worker.killed


async def test_a_full_disk_takes_no_event_and_loses_no_trajectory():
    """The pool tells of each retry and loss; a note that can't be written must not cost the trajectory that
    it is about."""

    async def dies(method, *args):
        raise WorkerLostError("killed")

    def full(event):
        raise OSError(errno.ENOSPC, "No space left on device")

    pool = RolloutPool(
        RolloutSettings(template="lab"),
        model_path="m",
        retriever_url="http://x",
        retriever_timeout_seconds=1,
        on_event=full,
    )
    pool._roster.target = 2
    pool._roster.members = {0: member(0, dies), 1: member(1, samples)}
    done = await asyncio.wait_for(pool.rollout(requests(4)), 60)
    assert [t.uid for t in done] == [f"u{i}" for i in range(4)]


async def test_a_batch_in_lockstep_counts_as_the_trajectories_that_it_is():
    asked, answer = asyncio.Event(), asyncio.Event()

    async def samples_once_told(method, requests):
        asked.set()
        await answer.wait()
        return [await samples("rollout", request) for request in requests]

    pool = pool_of(member(0, samples_once_told), deterministic=True)
    batch = asyncio.create_task(pool.rollout(requests(16)))
    await asyncio.wait_for(asked.wait(), 30)
    assert pool.waits_for() == "16 trajectories on 1 rollout worker"
    answer.set()
    assert len(await asyncio.wait_for(batch, 30)) == 16
    assert pool.waits_for() == "0 trajectories on 1 rollout worker"
    answer.clear()
    asked.clear()
    batch = asyncio.create_task(pool.rollout(requests(1)))
    await asyncio.wait_for(asked.wait(), 30)
    assert pool.waits_for() == "1 trajectory on 1 rollout worker"
    batch.cancel()


async def test_lockstep_does_not_wait_for_a_slot_that_was_given_up():
    pool = pool_of(member(0, samples), target=2, deterministic=True)
    pool._roster.given_up[1] = "5 workers ended without having finished a trajectory"
    with pytest.raises(EnvironmentLacks, match="slot 1: 5 workers ended"):
        await asyncio.wait_for(pool._serving_in(1), 60)


async def test_a_worker_that_moves_into_a_given_up_slot_is_replaced_when_it_dies(monkeypatch):
    pool = pool_of(member(1, samples), member(2, samples), target=3)
    book, asked = pool._roster, []
    book.given_up[0] = "5 workers ended without having finished a trajectory"

    async def replace(slot):
        asked.append(slot)

    monkeypatch.setattr(pool._membership, "_replace", replace)
    moved = book.get("w2.1")
    await pool.drain("w1.1")
    pool._membership._look()
    await asyncio.sleep(0)
    assert moved.slot == 0 and asked == [1]
    book.lose(moved, WorkerLostError("killed"))
    pool._membership._fill()
    await asyncio.sleep(0)
    assert asked == [1, 0]


@pytest.mark.parametrize(("room", "crashes"), [(False, 0), (True, 1)])
async def test_a_slot_without_room_is_no_crash_and_a_worker_that_dies_while_it_starts_is(
    monkeypatch, room, crashes
):
    """Both are the same class of error: a full cluster must not use up the slot's CRASHES."""

    async def reserve(settings):
        if not room:
            raise EnvironmentLacks("no room for a rollout worker")
        return SimpleNamespace(bundle_specs=[{}])

    async def dies(method, *args):
        raise WorkerLostError("killed")

    monkeypatch.setattr(placement, "reserve", reserve)
    monkeypatch.setattr(placement, "create_worker", lambda *arguments: ScriptedWorker(dies))
    pool = pool_of(target=1)
    await pool._membership._replace(0)
    assert (pool._roster.crashes[0], pool._roster.no_room) == (crashes, set() if room else {0})
    assert [e["event"] for e in pool.events] == ["worker_start_failed"]
