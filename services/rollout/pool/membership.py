"""The coming and going of workers: starting, replacing, draining them, and pinging those that are there.

A worker joins once it holds the current weights (`Delivery.catch_up`). One that dies is taken out by
`Roster.lose`; the next look, HEARTBEAT_SECONDS later at most, starts its successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from services.common.errors import EnvironmentLacks
from services.contracts import WorkerInfo
from services.rollout.errors import WorkerLostError
from services.rollout.pool import placement
from services.rollout.pool.delivery import Delivery
from services.rollout.pool.member import Member
from services.rollout.pool.neighbours import Neighbours
from services.rollout.pool.placement import WorkerArguments
from services.rollout.pool.roster import Roster
from services.rollout.pool.turns import Turns
from services.rollout.pool.worker_handle import one_line
from services.worker_state import WorkerState

_log = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 30.0
"""A worker that has not answered a ping for so long is taken for dead."""
FIRST_BACK_OFF_SECONDS = 1.0
LAST_BACK_OFF_SECONDS = 30.0
CRASHES = 5
"""Workers of one slot that end without having finished a trajectory, before the slot is given up."""
NO_ROOM_YET = "room on the cluster"
"""What a worker waits for at first."""
CLOSE_SECONDS = 10.0
STAGE_SECONDS = 5.0
ASK_SECONDS = 60.0
"""A worker that starts is asked so often how far it is, and may take so long for the answer."""
GRACE_SECONDS = 10.0
"""Beyond a worker's own deadlines, before the pool's."""


class Membership:
    """Keeps as many workers in the roster as are wanted."""

    def __init__(
        self, roster: Roster, delivery: Delivery, arguments: WorkerArguments, *, learner_gpus: int = 0
    ):
        self._roster = roster
        self._delivery = delivery
        self._arguments = arguments
        self._settings = roster.settings
        self._learner_gpus = learner_gpus
        self.follows_cluster = self._settings.workers == "all"
        """True where the number of workers wanted follows the cluster's resources."""
        self._watcher: asyncio.Task | None = None
        self._retiring: set[asyncio.Task] = set()
        self._pings: dict[Member, asyncio.Task] = {}
        self._turns = Turns()
        self._neighbours = Neighbours(self._settings.workers_per_gpu)
        self._to_be_placed: set[int] = set()
        """Slots of `start` that are wanted still, and have no room on the cluster yet."""
        self._placed = asyncio.Event()
        """Set once there are none."""
        self._beside: asyncio.Task | None = None
        """What `start` runs beside the workers."""

    async def start(self, beside: Callable[[], Awaitable[None]] | None = None) -> None:
        """As RolloutPool. `scale` may be called meanwhile: a slot that is no longer wanted is not waited for,
        and neither is one that is added. So may `close`, which ends it: raises EnvironmentLacks."""
        roster = self._roster
        roster.target = placement.count(self._settings, ray.cluster_resources(), self._learner_gpus)
        if roster.target == 0:
            raise EnvironmentLacks(f"rollout.workers=all found none: {placement.describe(self._settings)}")
        self._to_be_placed = set(range(roster.target))
        tasks = [self._starting(slot, self._start_member(slot)) for slot in range(roster.target)]
        if beside is not None:
            self._beside = asyncio.create_task(self._once_placed(beside))
            tasks.append(self._beside)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if roster.closed:  # which cancels them all
                raise EnvironmentLacks("the rollout pool was closed")
            for task in done:
                if not task.cancelled():  # as that of a slot that is no longer wanted
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._watcher = asyncio.create_task(self._watch())

    async def _once_placed(self, beside: Callable[[], Awaitable[None]]) -> None:
        await self._placed.wait()
        await beside()

    def _is_placed(self, slot: int) -> None:
        """A slot has its room, or is not wanted any more."""
        self._to_be_placed.discard(slot)
        if not self._to_be_placed:
            self._placed.set()

    async def close(self) -> None:
        roster = self._roster
        roster.closed = True
        ours = [task for task in (self._beside, self._watcher) if task is not None]
        tasks = [*roster.starting.values(), *self._retiring, *ours]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        members = roster.all()
        roster.members = {}
        roster.leaving = set()
        await asyncio.gather(*(self._end(m) for m in members))

    def lacking(self, n: int, held: Mapping[str, float]) -> str | None:
        """Demand of `n` workers against supply, where the cluster could never hold them all beside what the
        run holds besides; None where it could."""
        return placement.lacking(self._settings, n, ray.cluster_resources(), held)

    # -- fewer and more

    async def scale(self, n: int | Literal["all"]) -> None:
        roster = self._roster
        self.follows_cluster = n == "all"
        roster.target = self._room() if n == "all" else n
        # Whoever asks for another number has seen to what crashed: every slot is tried again.
        roster.given_up.clear()
        roster.crashes.clear()
        leaving = self._trim()
        self._fill()
        roster.changed()
        await asyncio.gather(*map(self._retire, leaving))

    def _room(self) -> int:
        """Workers that the cluster can hold."""
        everything = self._settings.model_copy(update={"workers": "all"})
        return max(1, placement.count(everything, ray.cluster_resources(), self._learner_gpus))

    def drain(self, id: str) -> Coroutine[Any, Any, None]:
        """From the call on one worker fewer is wanted, and it gets nothing new; the result waits until it has
        left. Raises KeyError for an unknown worker."""
        member = self._roster.get(id)
        if member.state is not WorkerState.DRAINING:
            self.follows_cluster = False
            self._roster.target = max(0, self._roster.target - 1)
            self._roster.take_out(member)
        return self._retire(member)

    def _trim(self) -> list[Member]:
        """Slots are 0 .. target - 1. A worker beyond moves into a free one, or one whose worker is not up
        yet, which is given up; otherwise it is taken out, and the caller retires it."""
        roster = self._roster
        for slot in [s for s in roster.starting if s >= roster.target]:
            self._give_up_start(slot)
        leaving = []
        for slot in sorted(s for s in roster.members if s >= roster.target):
            member = roster.members[slot]
            if places := self._free_slots() or self._starting_slots():
                self._give_up_start(places[0])
                roster.move(member, places[0])
            else:
                leaving.append(member)
        for member in leaving:
            roster.take_out(member)
        return leaving

    def _give_up_start(self, slot: int) -> None:
        """End what starts in a slot, if anything does."""
        if (task := self._roster.starting.get(slot)) is not None:
            task.cancel()
        self._is_placed(slot)

    def _starting_slots(self) -> list[int]:
        """Slots whose worker is not up yet; those that wait for room first."""
        roster = self._roster
        slots = (roster.starting.keys() - roster.members.keys()) & set(range(roster.target))
        return sorted(slots, key=lambda slot: (roster.stages.get(slot) != NO_ROOM_YET, slot))

    def _free_slots(self) -> list[int]:
        roster = self._roster
        taken = roster.members.keys() | roster.starting.keys()
        return [slot for slot in range(roster.target) if slot not in taken]

    async def _retire(self, member: Member) -> None:
        """Wait for what it runs as long as a trajectory may take, then end it."""
        roster = self._roster
        if member.jobs:
            limit = self._settings.trajectory_timeout_seconds + GRACE_SECONDS
            await asyncio.wait(list(member.jobs.values()), timeout=limit)
        if member in roster.leaving:
            roster.leaving.discard(member)
            for task in list(member.jobs.values()):
                task.cancel()
            await self._end(member)
            roster.note({"event": "worker_left", "worker": member.id})

    async def _end(self, member: Member) -> None:
        try:
            await member.worker.close(timeout_seconds=CLOSE_SECONDS)
        except (WorkerLostError, RayError, TimeoutError) as e:  # RayError: the call could not even be made
            reason = one_line(e)
            self._roster.note({"event": "worker_close_failed", "worker": member.id, "reason": reason})
        finally:
            member.worker.kill()

    # -- starting

    async def _start_member(self, slot: int) -> None:
        """Start a worker once there is room for it. Raises as `placement.reserve` and `_start_on`."""
        self._roster.stages[slot] = NO_ROOM_YET
        group = await placement.reserve(self._settings)
        self._is_placed(slot)
        await self._start_on(group, slot)

    async def _start_on(self, group: PlacementGroup, slot: int) -> None:
        """Start a worker on reserved resources, give it the current weights, let it join. Raises
        EnvironmentLacks where it dies or is late, and the worker's own errors; the resources are given back
        then."""
        roster = self._roster
        roster.no_room.discard(slot)
        # A name is never used again: what comes late of the last worker in this slot is not taken for this
        # one's.
        roster.incarnations[slot] += 1
        id = roster.name(slot)
        with contextlib.ExitStack() as undo:
            undo.callback(placement.release, group)
            # On shared GPUs an engine takes its memory as it starts: only in the workers' turn is it free.
            await self._turns.before_engine()
            worker = placement.create_worker(id, self._settings, group, self._arguments)
            undo.pop_all()
            undo.callback(worker.kill)  # which gives the resources back too
            gpus = group.bundle_specs[0].get("GPU", 0)
            info = WorkerInfo(id, 0, "", 0, state=WorkerState.STARTING)
            member = Member(slot, id, worker, info, gpus=gpus)
            try:
                await self._bring_up(member)
                await self._delivery.catch_up(member)
            except WorkerLostError as e:
                raise EnvironmentLacks(f"rollout worker {id} died while it started: {e}") from e
            if slot in roster.members:
                return  # given up, and the cancel came too late: another worker has the slot
            undo.pop_all()
        roster.join(member)

    async def _bring_up(self, member: Member) -> None:
        limit = self._settings.start_timeout_seconds
        try:
            # The first answer tells where its process runs, should the engine not come up.
            self._roster.stages[member.slot] = "its process"
            member.info = await member.worker.info(timeout_seconds=limit)
            async with self._neighbours.one_at_a_time(member, self._roster.stages):
                await self._start_engine(member, limit)
        except TimeoutError:
            raise EnvironmentLacks(
                f"rollout worker {member.id}: its engine was not up within "
                f"rollout.start_timeout_seconds={limit:g}"
            ) from None

    async def _start_engine(self, member: Member, limit: float) -> None:
        over = asyncio.Event()
        asking = asyncio.create_task(self._ask_its_stage(member, over))
        try:
            member.info = await member.worker.start(timeout_seconds=limit)
        finally:
            over.set()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _ask_its_stage(self, member: Member, over: asyncio.Event) -> None:
        """Nothing hangs on an answer: whether the worker lives, its start tells. over: beside a cancel, which
        `wait_for` may swallow."""
        while not over.is_set():
            self._roster.stages[member.slot] = member.info.waits_for
            await asyncio.sleep(STAGE_SECONDS)
            with contextlib.suppress(TimeoutError, WorkerLostError, RayError):
                info = await member.worker.info(timeout_seconds=ASK_SECONDS)
                if not over.is_set():  # otherwise it is older than what the start has told
                    member.info = info

    def _fill(self) -> None:
        """Start a worker in each slot that lacks one."""
        roster = self._roster
        if roster.closed:
            return
        for slot in self._free_slots():
            if slot not in roster.given_up:
                self._starting(slot, self._replace(slot))

    def _starting(self, slot: int, work: Coroutine[Any, Any, None]) -> asyncio.Task:
        """A task that starts the worker of a slot."""
        roster = self._roster
        task = asyncio.create_task(work)
        roster.starting[slot] = task

        def ended(task: asyncio.Task) -> None:
            if roster.starting.get(slot) is task:
                del roster.starting[slot]
            roster.changed()

        task.add_done_callback(ended)
        return task

    async def _replace(self, slot: int) -> None:
        roster = self._roster
        crashes = roster.crashes[slot]
        if crashes >= CRASHES:
            last = roster.last_end.get(slot, "")
            reason = f"{crashes} workers ended without having finished a trajectory, the last by {last}"
            roster.given_up[slot] = reason
            roster.note({"event": "crash_loop", "slot": slot, "reason": reason})
            return
        if crashes:
            await asyncio.sleep(back_off(crashes))
        elif slot in roster.no_room:
            await asyncio.sleep(LAST_BACK_OFF_SECONDS)
        group = None
        roster.stages[slot] = NO_ROOM_YET
        try:
            group = await placement.reserve(self._settings)
            await self._start_on(group, slot)
        except Exception as e:
            if group is None and isinstance(e, EnvironmentLacks):
                # No crash: the cluster is full, and the slot is asked for again for as long as the run lasts.
                roster.no_room.add(slot)
            else:
                roster.crashes[slot] += 1
                roster.last_end[slot] = one_line(e)
            name = roster.name(slot)
            roster.note({"event": "worker_start_failed", "worker": name, "reason": one_line(e)})

    # -- watching

    async def _watch(self) -> None:
        """Replace missing workers and ping the others, every HEARTBEAT_SECONDS."""
        try:
            while True:
                try:
                    # A question to Ray's head, which may be away, and this loop must go on.
                    room = await asyncio.to_thread(self._room) if self.follows_cluster else None
                    self._look(room)
                except Exception as e:
                    # Ray's head restarts: the next look may go well, and must come.
                    _log.warning("the pool's look at its workers failed: %s", one_line(e))
                await asyncio.sleep(HEARTBEAT_SECONDS)
        finally:
            for ping in list(self._pings.values()):
                ping.cancel()

    def _look(self, room: int | None = None) -> None:
        """room: workers that the cluster can hold, where their number follows it."""
        roster = self._roster
        if self.follows_cluster and room is not None:
            # A node that joined or left; one worker at least is always wanted.
            roster.target = room
        for member in self._trim():  # nobody waits here for what it runs: the others must be watched
            task = asyncio.create_task(self._retire(member))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        self._fill()
        for member in [*roster.all(), *roster.waiting]:
            if member not in self._pings:  # otherwise the last one is not answered yet
                self._pings[member] = asyncio.create_task(self._ping(member))
        roster.changed()

    async def _ping(self, member: Member) -> None:
        roster = self._roster
        try:
            info = await member.worker.info(timeout_seconds=SILENCE_SECONDS)
        except (TimeoutError, WorkerLostError) as e:
            error = e
            if isinstance(e, TimeoutError):
                error = WorkerLostError(f"worker {member.id} has not answered for {SILENCE_SECONDS:g} s")
            if member in roster.all() or member in roster.waiting:
                roster.lose(member, error)
            return
        finally:
            del self._pings[member]
        if left_out := info.hits_left_out - member.info.hits_left_out:
            roster.note({"event": "hits_left_out", "worker": member.id, "hits": left_out})
        member.info = info

    # -- turns on shared GPUs

    async def sleep(self) -> None:
        """Have all workers give the GPUs to the learner; one that does not is replaced."""
        limit = self._settings.start_timeout_seconds
        # Deadlock otherwise: a starting worker waits for a sync that comes only after the learner's turn,
        # which waits for that worker.
        self._delivery.no_sync_comes()
        await self._turns.give_to_learner(limit, self._starting_in_vain)
        await self._in_turn("sleep", lambda m: m.worker.sleep(timeout_seconds=limit))

    async def wake(self) -> None:
        """Have all workers take the GPUs back; one that does not is replaced."""
        limit = self._settings.start_timeout_seconds
        await self._in_turn("wake", lambda m: m.worker.wake(timeout_seconds=limit))
        self._turns.give_to_workers()

    def _starting_in_vain(self) -> set[asyncio.Task]:
        """Tasks of workers that wait for weights which the learner sends only after its turn."""
        starting = self._roster.starting
        return {starting[m.slot] for m in self._roster.waiting if m.slot in starting}

    async def _in_turn(self, verb: str, call: Callable[[Member], Coroutine[Any, Any, None]]) -> None:
        members = self._roster.joined()
        results = await asyncio.gather(*map(call, members), return_exceptions=True)
        for m, error in zip(members, results, strict=True):
            if isinstance(error, Exception):
                lost = WorkerLostError(f"worker {m.id} did not {verb}: {one_line(error)}")
                self._roster.lose(m, lost)


def back_off(attempt: int) -> float:
    """Seconds before another attempt after `attempt` failures, which is at least 1."""
    return min(LAST_BACK_OFF_SECONDS, FIRST_BACK_OFF_SECONDS * 2 ** (attempt - 1))
