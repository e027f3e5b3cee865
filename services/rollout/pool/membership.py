"""Which workers there are: starting, replacing, draining them, and the version of the weights that they hold.

    slot 0:  w0.1
    slot 1:  w1.1 (dead)  w1.2      the second incarnation in slot 1

There are as many slots as workers are wanted. A worker joins once it holds the current weights, and serves only while it holds them whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal

import ray
from ray.exceptions import RayError

from services.contracts import WorkerInfo
from services.rollout.errors import NoWorkersError, UnschedulableError, WorkerLostError
from services.rollout.pool import placement
from services.rollout.pool.delivery import Delivery
from services.rollout.pool.member import Member, one_line
from services.rollout.pool.turns import Turns
from services.settings import RolloutSettings, WeightSyncSettings

_log = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 30.0
"""A worker that has not answered a ping for so long is taken for dead."""
FIRST_BACK_OFF_SECONDS, LAST_BACK_OFF_SECONDS = 1.0, 30.0
CRASHES = 5
"""Workers of one slot that end without having finished a trajectory, before the slot is given up."""
CLOSE_SECONDS = 10.0
GRACE_SECONDS = 10.0
"""Beyond a worker's own deadlines, before the pool's."""


class Membership:
    """The workers of a pool. `on_change` is called whenever a worker begins or ceases to serve."""

    def __init__(
        self,
        settings: RolloutSettings,
        sync: WeightSyncSettings,
        worker_arguments: dict[str, Any],
        on_event: Callable[[dict], None],
        on_change: Callable[[], None],
        learner_gpus: int = 0,
    ):
        self._settings, self._on_event, self._on_change = settings, on_event, on_change
        self._learner_gpus = learner_gpus
        self._worker_arguments = worker_arguments | {"sync": sync}
        self.target = 0
        self._follow_cluster = settings.workers == "all"
        self.delivery = Delivery(
            sync,
            members=lambda: list(self._members.values()),
            lose=self.lose,
            check_hope=self.check_hope,
            on_event=on_event,
            on_change=on_change,
            parts=settings.tensor_parallel,
        )
        self._members: dict[int, Member] = {}
        self._starting: dict[int, asyncio.Task] = {}
        self._leaving: set[Member] = set()
        self._incarnations: Counter[int] = Counter()
        self._crashes: Counter[int] = Counter()
        self._given_up: dict[int, str] = {}
        self._last_end: dict[int, str] = {}
        """Why the last worker of a slot ended."""
        self._no_room: set[int] = set()
        """Slots whose worker the cluster had no resources for, last time."""
        self._watcher: asyncio.Task | None = None
        self._retiring: set[asyncio.Task] = set()
        self._turns = Turns()
        self._closed = False

    # -- who serves

    def all(self) -> list[Member]:
        return [*(self._members[s] for s in sorted(self._members)), *self._leaving]

    def get(self, id: str) -> Member:
        """Raises KeyError that lists the workers there are."""
        for member in self.all():
            if member.id == id:
                return member
        raise KeyError(f"no rollout worker {id}; there are {', '.join(m.id for m in self.all()) or 'none'}")

    def serving(self) -> list[Member]:
        """Workers that take trajectories now, by slot."""
        return [
            m
            for _, m in sorted(self._members.items())
            if m.state == "ready" and m.version == self.delivery.version
        ]

    def check_hope(self, slot: int | None = None) -> None:
        """Raises NoWorkersError where nobody serves (in that very slot, where one is named) and nobody will without outside help."""
        if self._closed:
            raise NoWorkersError("the rollout pool is closed")
        if slot is not None and slot >= self.target:
            raise NoWorkersError(f"slot {slot} was given up: the pool was scaled to {self.target}")
        if slot is not None and slot not in self._members and slot in self._given_up.keys() | self._no_room:
            raise NoWorkersError(f"slot {slot} has its share of the batch, and no worker: {self.problem}")
        if (
            any(m.state in ("ready", "syncing") for m in self._members.values())
            or self.delivery.expects_weights
        ):
            return
        if set(range(self.target)) - self._members.keys() - self._given_up.keys() - self._no_room:
            return  # that slot's worker starts, or will at the next look
        if self.target == 0:
            raise NoWorkersError("no rollout worker is left: the pool was scaled to 0")
        if self._members:
            raise NoWorkersError(
                "no rollout worker holds a whole version of the weights: the last sync failed on all of them"
            )
        if self._no_room & set(range(self.target)):
            raise NoWorkersError(
                f"no rollout worker is left, and there is no room for another: {placement.describe(self._settings)}"
            )
        if len(self._given_up) >= self.target:
            reasons = "; ".join(f"slot {slot}: {reason}" for slot, reason in sorted(self._given_up.items()))
            raise NoWorkersError(
                f"no rollout worker is left, and replacements ended one after the other ({reasons})"
            )

    def describe(self) -> list[WorkerInfo]:
        there = [*self.all(), *self.delivery.waiting]
        come = self._starting.keys() - {m.slot for m in there if m.state != "draining"}
        starting = [WorkerInfo(self._name(slot), 0, "", 0, state="starting") for slot in come]
        return sorted([*(m.describe() for m in there), *starting], key=lambda w: w.id)

    def waits_for(self) -> str:
        """What stands between the trajectories that are asked for and their end, in one line."""
        serving = self.serving()
        if not serving:
            coming = ", ".join(f"{w.id} is {w.state}" for w in self.describe()) or "none is starting"
            ends = "; ".join(dict.fromkeys(self._last_end.values()))
            why = self.problem or (f"the last one ended by {ends}" if ends else "")
            return f"no rollout worker serves: {coming}" + (f" ({why})" if why else "")
        searching = [f"{m.id}: {m.info.waits_for}" for m in serving if m.info.waits_for]
        running = f"{sum(len(m.jobs) for m in serving)} trajectories on {len(serving)} rollout workers"
        return "; ".join([running, *searching])

    # -- coming and going

    async def start(self) -> None:
        self.target = placement.count(self._settings, ray.cluster_resources(), self._learner_gpus)
        if self.target == 0:
            raise UnschedulableError(f"rollout.workers=all found none: {placement.describe(self._settings)}")
        tasks = [asyncio.create_task(self._start_member(slot)) for slot in range(self.target)]
        self._starting = dict(enumerate(tasks))
        try:
            await asyncio.gather(*tasks)
        finally:
            self._starting = {}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        self._closed = True
        tasks = [*self._starting.values(), *self._retiring, *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        members, self._members, self._leaving = self.all(), {}, set()
        await asyncio.gather(*(self._end(m) for m in members))

    @property
    def follows_cluster(self) -> bool:
        return self._follow_cluster

    @property
    def _wanted(self) -> RolloutSettings:
        return self._settings.model_copy(update={"workers": self.target})

    def lacking(self, n: int, held: Mapping[str, float]) -> str | None:
        """What `n` workers ask for, where the cluster could never hold them all beside what else the run
        holds; otherwise None."""
        return placement.lacking(self._settings, n, ray.cluster_resources(), held)

    @property
    def problem(self) -> str | None:
        """Why there are fewer workers than wanted, where that does not pass by itself."""
        if self._no_room & set(range(self.target)):
            return f"no room for another worker: {placement.describe(self._wanted)}"
        return "; ".join(f"slot {slot}: {reason}" for slot, reason in sorted(self._given_up.items())) or None

    async def scale(self, n: int | Literal["all"]) -> None:
        self._follow_cluster = n == "all"
        self.target = self._room() if n == "all" else n
        self._given_up.clear()
        self._crashes.clear()
        leaving = self._trim()
        self._fill()
        self._on_change()
        await asyncio.gather(*map(self._retire, leaving))

    def _room(self) -> int:
        everything = self._settings.model_copy(update={"workers": "all"})
        return max(1, placement.count(everything, ray.cluster_resources(), self._learner_gpus))

    def drain(self, id: str) -> Coroutine[Any, Any, None]:
        """From the call on one worker fewer is wanted, and it gets nothing new; the result waits until it has left."""
        member = self.get(id)
        if member.state != "draining":
            self._follow_cluster = False
            self.target = max(0, self.target - 1)
            self._take_out(member)
        return self._retire(member)

    def _trim(self) -> list[Member]:
        """Slots are 0 .. target - 1: a worker beyond moves into a free one, or is taken out, to be retired."""
        for slot in [s for s in self._starting if s >= self.target]:
            self._starting[slot].cancel()
        leaving = []
        for slot in sorted(s for s in self._members if s >= self.target):
            free = [s for s in range(self.target) if s not in self._members and s not in self._starting]
            if free:
                member = self._members.pop(slot)
                member.slot = free[0]
                self._given_up.pop(free[0], None)  # that was another worker's
                del self._crashes[free[0]]
                self._members[free[0]] = member
            else:
                leaving.append(self._members[slot])
        for member in leaving:
            self._take_out(member)
        return leaving

    def _take_out(self, member: Member) -> None:
        """Give it nothing new."""
        if self._members.get(member.slot) is member:
            del self._members[member.slot]
        self._leaving.add(member)
        member.state = "draining"
        self._on_event({"event": "worker_drain", "worker": member.id})
        self._on_change()

    async def _retire(self, member: Member) -> None:
        """Wait for what it runs as long as a trajectory may take, then end it."""
        if member.jobs:
            limit = self._settings.trajectory_timeout_seconds + GRACE_SECONDS
            await asyncio.wait(list(member.jobs.values()), timeout=limit)
        if member in self._leaving:
            self._leaving.discard(member)
            for task in list(member.jobs.values()):
                task.cancel()
            await self._end(member)
            self._on_event({"event": "worker_left", "worker": member.id})

    async def _end(self, member: Member) -> None:
        try:
            await member.call("close", timeout_seconds=CLOSE_SECONDS)
        except (WorkerLostError, RayError, TimeoutError) as e:
            self._on_event({"event": "worker_close_failed", "worker": member.id, "reason": one_line(e)})
            member.end()
        except asyncio.CancelledError:
            member.end()
            raise
        else:
            member.end()

    def finished(self, member: Member, trajectories: int) -> None:
        """A worker that finishes trajectories is no part of a crash loop."""
        self._crashes[member.slot] = 0
        member.timeouts = 0
        member.trajectories += trajectories

    def lose(self, member: Member, error: BaseException) -> None:
        """A worker is dead, or as good as dead: take it out, have what it ran run elsewhere, have it replaced."""
        if member.lost is not None:
            return
        member.lost = (
            error if isinstance(error, WorkerLostError) else WorkerLostError(f"worker {member.id}: {error}")
        )
        if self._members.get(member.slot) is member:
            del self._members[member.slot]
            self._crashes[member.slot] += 1
            self._last_end[member.slot] = one_line(error)
        self._leaving.discard(member)
        member.state = "failed"
        member.end()
        self._on_event(
            {"event": "worker_lost", "worker": member.id, "pid": member.info.pid, "reason": one_line(error)}
        )
        for task in list(member.jobs.values()):
            task.cancel()
        self._on_change()

    def _name(self, slot: int) -> str:
        return f"w{slot}.{max(1, self._incarnations[slot])}"

    async def _start_member(self, slot: int) -> None:
        """Start a worker, give it the current weights, let it join. Raises UnschedulableError, NoWorkersError, and its own errors."""
        group = await placement.reserve(self._settings)
        self._no_room.discard(slot)
        self._incarnations[slot] += 1
        id, limit = self._name(slot), self._settings.start_timeout_seconds
        try:
            await self._turns.before_engine()
            actor = placement.create_actor(id, self._settings, group, **self._worker_arguments)
        except BaseException:
            placement.release(group)
            raise
        gpus = group.bundle_specs[0].get("GPU", 0)
        member = Member(slot, id, group, actor, WorkerInfo(id, 0, "", 0, state="starting"), gpus=gpus)
        try:
            try:
                member.info = await member.call("info", timeout_seconds=limit)
                member.info = await member.call("start", timeout_seconds=limit)
            except TimeoutError:
                raise NoWorkersError(
                    f"rollout worker {id}: its engine was not up within rollout.start_timeout_seconds={limit:g}"
                ) from None
            await self.delivery.catch_up(member)
        except WorkerLostError as e:
            member.end()
            raise NoWorkersError(f"rollout worker {id} died while it started: {e}") from e
        except BaseException:
            member.end()
            raise
        member.state = "ready"
        self._members[slot] = member
        event = {
            "event": "worker_join",
            "worker": id,
            "pid": member.info.pid,
            "node": member.info.node,
            "version": member.version,
        }
        self._on_event(event)
        self._on_change()

    def _fill(self) -> None:
        for slot in range(self.target):
            if (
                slot not in self._members
                and slot not in self._starting
                and slot not in self._given_up
                and not self._closed
            ):
                task = self._starting[slot] = asyncio.create_task(self._replace(slot))
                task.add_done_callback(lambda t, s=slot: self._started(s, t))

    def _started(self, slot: int, task: asyncio.Task) -> None:
        if self._starting.get(slot) is task:
            del self._starting[slot]
        self._on_change()

    async def _replace(self, slot: int) -> None:
        crashes = self._crashes[slot]
        if crashes >= CRASHES:
            last = self._last_end.get(slot, "")
            self._given_up[slot] = (
                f"{crashes} workers ended without having finished a trajectory, the last by {last}"
            )
            self._on_event({"event": "crash_loop", "slot": slot, "reason": self._given_up[slot]})
            return
        if crashes:
            await asyncio.sleep(min(LAST_BACK_OFF_SECONDS, FIRST_BACK_OFF_SECONDS * 2 ** (crashes - 1)))
        elif slot in self._no_room:
            await asyncio.sleep(LAST_BACK_OFF_SECONDS)
        try:
            await self._start_member(slot)
        except Exception as e:
            if isinstance(e, UnschedulableError):
                self._no_room.add(slot)
            else:
                self._crashes[slot] += 1
                self._last_end[slot] = one_line(e)
            self._on_event(
                {"event": "worker_start_failed", "worker": self._name(slot), "reason": one_line(e)}
            )

    async def _watch(self) -> None:
        """Replace what is missing, and ping what is there."""
        pings: dict[Member, asyncio.Task] = {}
        try:
            while True:
                try:
                    # A question to Ray's head, which may be away, and this loop must go on.
                    room = await asyncio.to_thread(self._room) if self._follow_cluster else None
                    self._look(pings, room)
                except Exception as e:
                    # Ray's head restarts, a full disk takes no event: the next look may go well, and must come.
                    _log.warning("the pool's look at its workers failed: %s", one_line(e))
                await asyncio.sleep(HEARTBEAT_SECONDS)
        finally:
            for ping in list(pings.values()):
                ping.cancel()

    def _look(self, pings: dict[Member, asyncio.Task], room: int | None = None) -> None:
        """room: workers that the cluster can hold, where their number follows it."""
        if self._follow_cluster and room is not None:
            # A node that joined or left; one worker at least is always wanted.
            self.target = room
        for member in self._trim():  # nobody waits here for what it runs: the others must be watched
            task = asyncio.create_task(self._retire(member))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        self._fill()
        for member in [*self.all(), *self.delivery.waiting]:
            if member not in pings:
                ping = pings[member] = asyncio.create_task(self._ping(member))
                ping.add_done_callback(lambda _, m=member: pings.pop(m))
        self._on_change()

    async def _ping(self, member: Member) -> None:
        try:
            info = await member.call("info", timeout_seconds=SILENCE_SECONDS)
            if left_out := info.hits_left_out - member.info.hits_left_out:
                self._on_event({"event": "hits_left_out", "worker": member.id, "hits": left_out})
            member.info = info
            return
        except TimeoutError:
            error = WorkerLostError(f"worker {member.id} has not answered for {SILENCE_SECONDS:g} s")
        except WorkerLostError as e:
            error = e
        if member in self.all() or member in self.delivery.waiting:
            self.lose(member, error)

    async def take_turns(self, call: Literal["sleep", "wake"]) -> None:
        """Have all workers give the GPUs to the learner, or take them back; one that does not is replaced."""
        limit = self._settings.start_timeout_seconds
        if call == "sleep":
            self.delivery.no_sync_comes()
            lack = self.delivery.waiting
            await self._turns.of_learner(
                limit, lambda: {self._starting[m.slot] for m in lack if m.slot in self._starting}
            )
        members = list(self._members.values())
        results = await asyncio.gather(
            *(m.call(call, timeout_seconds=limit) for m in members), return_exceptions=True
        )
        for m, error in zip(members, results, strict=True):
            if isinstance(error, Exception):
                self.lose(m, WorkerLostError(f"worker {m.id} did not {call}: {one_line(error)}"))
        if call == "wake":
            self._turns.of_workers()
