"""Workers that join, leave, fail or hang while weights are sent."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from scripted_pool import member, pool_of, until

from services.contracts import WeightUpdate
from services.rollout.errors import WorkerLostError
from services.rollout.pool import delivery as deliveries
from services.rollout.pool.delivery import Delivery
from services.rollout.pool.roster import Roster
from services.settings import RolloutSettings, WeightSyncSettings
from services.weight_sync import GroupBrokenError, WeightsGoneError
from services.weight_sync.base import HalfWrittenError
from services.weight_sync.group import Ticket


async def test_a_joiner_whose_weights_are_lost_with_their_learner_waits_for_the_next():
    events, given = [], []

    async def takes(method, update):
        given.append(update)
        if update is lost:
            raise WeightsGoneError("weights of version 1: its learner has gone")
        return update.version

    lost, sent_again = WeightUpdate(1, "shared_memory", (), 0), WeightUpdate(1, "shared_memory", (), 0)
    roster = Roster(RolloutSettings(), on_event=events.append, on_change=lambda: None)
    delivery = Delivery(WeightSyncSettings(timeout_seconds=5), roster, parts=1)
    delivery.update, roster.version = lost, 1
    joiner = member(0, takes, state="starting")
    joining = asyncio.create_task(delivery.catch_up(joiner))
    await until(lambda: roster.waiting)
    assert (
        [e["event"] for e in events] == ["weights_gone"]
        and joiner.state == "waiting"
        and delivery.wants_learner
    )
    await delivery.sync(sent_again)
    await asyncio.wait_for(joining, 60)
    assert given == [lost, sent_again] and joiner.version == 1 and not roster.waiting


async def test_a_joiner_that_is_lost_while_its_weights_are_fetched_is_lost_and_nothing_else():
    async def takes(method, update):
        roster.lose(joiner, WorkerLostError("no answer to a ping"))
        raise WeightsGoneError("weights of version 1: its learner has gone")

    roster = Roster(RolloutSettings(), on_event=lambda event: None, on_change=lambda: None)
    delivery = Delivery(WeightSyncSettings(timeout_seconds=5), roster, parts=1)
    delivery.update, roster.version = WeightUpdate(1, "shared_memory", (), 0), 1
    joiner = member(0, takes, state="starting")
    with pytest.raises(WorkerLostError, match="no answer to a ping"):
        await asyncio.wait_for(delivery.catch_up(joiner), 60)
    assert joiner.state == "failed" and not roster.waiting


def ticket(version, *workers):
    ranks = {worker: rank for rank, worker in enumerate(workers, 1)}
    return Ticket("e", version, "gloo", "here", 1, "learner rank 0", ranks, 1, 5.0, 2**20, False, [])


@pytest.mark.parametrize("leaves", ["drained", "lost", "all lost"])
async def test_a_worker_that_leaves_between_offer_and_sync_is_not_waited_for(monkeypatch, leaves):
    """The group was made for it too: nobody else can tell the ranks that it does not come."""
    told, group_is_broken = [], asyncio.Event()
    loop = asyncio.get_running_loop()

    def break_group(ticket, reason):
        told.append(reason)
        loop.call_soon_threadsafe(group_is_broken.set)

    monkeypatch.setattr(deliveries, "break_group", break_group)

    async def waits_for_the_group(method, *args):
        if method == "update_weights":
            await group_is_broken.wait()
            raise GroupBrokenError(told[0])

    pool = pool_of(member(0, waits_for_the_group), member(1, waits_for_the_group), target=2)
    book = pool._roster
    offered = [r.id for r in await pool.receivers(1)]
    assert offered == ["w0.1", "w1.1"]
    if leaves == "drained":
        leaving = pool.drain("w1.1")
    else:
        leaving = asyncio.sleep(0)
        for m in book.all() if leaves == "all lost" else book.all()[1:]:
            book.lose(m, WorkerLostError("killed"))
    syncing = pool.sync(WeightUpdate(1, "gloo", ticket(1, *offered), 0))
    expected = (
        contextlib.nullcontext() if leaves == "all lost" else pytest.raises(GroupBrokenError, match=r"w1\.1")
    )
    with expected:
        await asyncio.wait_for(syncing, 20)
    assert "w1.1" in told[0]  # the learner waits in the group too
    await leaving
    assert [r.id for r in await pool.receivers(1)] == ([] if leaves == "all lost" else ["w0.1"])


async def test_a_worker_that_is_drained_while_the_group_is_told_of_another_that_left_stays_drained(
    monkeypatch,
):
    async def broken(method, *args):
        if method == "update_weights":
            raise HalfWrittenError("w1.1 left")

    pool = pool_of(member(0, broken), member(1, broken), member(2, broken), target=3)
    book, loop, told = pool._roster, asyncio.get_running_loop(), asyncio.Event()
    monkeypatch.setattr(
        deliveries,
        "break_group",
        lambda *args: asyncio.run_coroutine_threadsafe(told.wait(), loop).result(60),
    )
    offered = [r.id for r in await pool.receivers(1)]
    book.lose(book.get("w1.1"), WorkerLostError("killed"))
    syncing = asyncio.create_task(pool.sync(WeightUpdate(1, "gloo", ticket(1, *offered), 0)))
    await asyncio.sleep(0.05)
    leaver = book.get("w0.1")
    leaving = pool.drain("w0.1")
    told.set()
    with pytest.raises(GroupBrokenError):
        await asyncio.wait_for(syncing, 60)
    assert leaver.state == "draining"
    again = pool.drain("w0.1")
    assert book.target == 2
    await asyncio.gather(leaving, again)


@pytest.mark.parametrize("first", [True, False])
async def test_a_joiner_that_is_ready_in_mid_sync_joins_with_the_new_version(first):
    """Else it would idle until the next one."""
    sent = asyncio.Event()

    async def takes(method, update):
        if update.version == 2:
            await sent.wait()
        return update.version

    serving, joiner = member(0, takes, version=0 if first else 1), member(1, takes, state="starting")
    pool = pool_of(serving, target=2)
    delivery = pool._delivery
    if not first:
        delivery.update, pool._roster.version = WeightUpdate(1, "shared_memory", (), 0), 1
    syncing = asyncio.create_task(pool.sync(WeightUpdate(2, "shared_memory", (), 0)))
    await asyncio.sleep(0)
    joining = asyncio.create_task(delivery.catch_up(joiner))
    await asyncio.sleep(0.05)
    sent.set()
    await syncing
    await asyncio.wait_for(joining, 60)
    assert joiner.version == pool._roster.version == 2


@pytest.mark.parametrize("error", [MemoryError("out of memory"), None])
async def test_the_only_worker_that_fails_or_hangs_in_a_sync_is_replaced_and_the_run_goes_on(error):
    """As with a group: it does not refuse the weights, and its successor takes them."""

    async def fails(method, *args):
        if error is None:
            await asyncio.sleep(600)
        raise error

    only = member(0, fails)
    pool = pool_of(only)
    book = pool._roster
    pool._delivery._settings = WeightSyncSettings(timeout_seconds=0.2)
    await pool.sync(WeightUpdate(1, "shared_memory", (), 0))
    assert only.lost is not None and [e["event"] for e in pool.events] == ["sync_failed", "worker_lost"]
    successor = member(0, takes_weights, state="starting")
    await pool._delivery.catch_up(successor)
    assert successor.version == book.version == 1


async def takes_weights(method, update):
    return update.version
