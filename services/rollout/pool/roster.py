"""The workers of a pool and what is known of their slots. `Delivery` and `Membership` both work on it.

    slot 0:  w0.1
    slot 1:  w1.1 (dead)  w1.2      the second incarnation in slot 1

There are as many slots as workers are wanted. A worker serves only while it holds the weights in force whole.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from services.common.counting import counted
from services.common.errors import EnvironmentLacks
from services.contracts import WorkerInfo
from services.rollout.errors import WorkerLostError
from services.rollout.pool import placement
from services.rollout.pool.member import Member
from services.rollout.pool.worker_handle import one_line
from services.settings import RolloutSettings
from services.worker_state import WorkerState

_log = logging.getLogger(__name__)


class Roster:
    """`on_event` gets joins, losses and failures as flat dictionaries. `on_change` is called whenever a
    worker begins or ceases to serve."""

    def __init__(
        self,
        settings: RolloutSettings,
        *,
        on_event: Callable[[dict[str, Any]], None],
        on_change: Callable[[], None],
    ):
        self.settings = settings
        self._on_event = on_event
        self.changed = on_change
        self.target = 0
        """Workers wanted."""
        self.closed = False
        self.members: dict[int, Member] = {}
        """Workers that have joined, by slot."""
        self.waiting: set[Member] = set()
        """Workers that run, and have not joined for want of weights."""
        self.leaving: set[Member] = set()
        """Workers that finish what they run, and get nothing new."""
        self.starting: dict[int, asyncio.Task] = {}
        """Tasks that start a worker, by slot."""
        self.stages: dict[int, str] = {}
        """What the newest worker of a slot waits for, or has waited for, while it starts."""
        self.incarnations: Counter[int] = Counter()
        self.crashes: Counter[int] = Counter()
        """Workers of a slot that ended in a row without having finished a trajectory."""
        self.last_end: dict[int, str] = {}
        """Why the last worker of a slot ended."""
        self.given_up: dict[int, str] = {}
        """Slots that get no worker any more, and why."""
        self.no_room: set[int] = set()
        """Slots whose worker the cluster had no resources for, last time."""
        self.version = 0
        """The version of the weights in force."""
        self.sync_expected_until = 0.0
        """Time (monotonic) until which a sync that was announced is expected: no loan begins before it."""
        self.resend_expected_until = 0.0
        """Time (monotonic) until which the learner is expected to send once more what a broken group left
        half written."""

    def note(self, event: dict[str, Any]) -> None:
        """Report an event. A full disk takes none; the trajectory or worker that it is about must not be lost
        with it."""
        try:
            self._on_event(event)
        except OSError as e:
            _log.warning("%s was not noted: %s", event, e)

    # -- who there is

    def all(self) -> list[Member]:
        return [*(self.members[s] for s in sorted(self.members)), *self.leaving]

    def joined(self) -> list[Member]:
        return list(self.members.values())

    def serving(self) -> list[Member]:
        """Workers that take trajectories now, by slot."""
        ready = (m for _, m in sorted(self.members.items()) if m.state is WorkerState.READY)
        return [m for m in ready if m.version == self.version]

    def get(self, id: str) -> Member:
        """Raises KeyError that lists the workers there are."""
        for member in self.all():
            if member.id == id:
                return member
        raise KeyError(f"no rollout worker {id}; there are {', '.join(m.id for m in self.all()) or 'none'}")

    def name(self, slot: int) -> str:
        """The id of the newest incarnation in a slot."""
        return f"w{slot}.{max(1, self.incarnations[slot])}"

    def describe(self) -> list[WorkerInfo]:
        there = [*self.all(), *self.waiting]
        come = self.starting.keys() - {m.slot for m in there if m.state is not WorkerState.DRAINING}
        starting = [
            WorkerInfo(
                self.name(slot), 0, "", 0, state=WorkerState.STARTING, waits_for=self.stages.get(slot, "")
            )
            for slot in come
        ]
        return sorted([*(m.describe() for m in there), *starting], key=lambda w: w.id)

    # -- what is wrong

    @property
    def problem(self) -> str | None:
        """Why there are fewer workers than wanted, where that does not pass by itself."""
        if self._slots_without_room():
            wanted = self.settings.model_copy(update={"workers": self.target})
            return f"no room for another worker: {placement.describe(wanted)}"
        return self._reasons() or None

    def raise_if_no_worker_can_serve(self, slot: int | None = None) -> None:
        """Raises EnvironmentLacks where `why_nobody_can_serve` says why."""
        if (error := self.why_nobody_can_serve(slot)) is not None:
            raise error

    def why_nobody_can_serve(self, slot: int | None = None) -> EnvironmentLacks | None:
        """Why nobody serves (in `slot`, where it is given), and nobody will without help from outside; None
        where somebody does or will."""
        if self.closed:
            return EnvironmentLacks("the rollout pool is closed")
        if slot is not None and (given_up := self._why_slot_is_given_up(slot)) is not None:
            return given_up
        if any(m.state in (WorkerState.READY, WorkerState.SYNCING) for m in self.members.values()):
            return None
        if time.monotonic() < max(self.sync_expected_until, self.resend_expected_until):
            return None  # the weights that half-written workers lack are on their way
        if set(range(self.target)) - self.members.keys() - self.given_up.keys() - self.no_room:
            return None  # that slot's worker starts, or will at the next look
        if self.target == 0:
            return EnvironmentLacks("no rollout worker is left: the pool was scaled to 0")
        if self.members:
            return EnvironmentLacks(
                "no rollout worker holds a whole version of the weights: the last sync failed on all of them"
            )
        if self._slots_without_room():
            return EnvironmentLacks(
                "no rollout worker is left, and there is no room for another: "
                f"{placement.describe(self.settings)}"
            )
        if len(self.given_up) >= self.target:
            return EnvironmentLacks(
                f"no rollout worker is left, and replacements ended one after the other ({self._reasons()})"
            )
        return None

    def _why_slot_is_given_up(self, slot: int) -> EnvironmentLacks | None:
        if slot >= self.target:
            return EnvironmentLacks(f"slot {slot} was given up: the pool was scaled to {self.target}")
        if slot not in self.members and (slot in self.given_up or slot in self.no_room):
            return EnvironmentLacks(f"slot {slot} has its share of the batch, and no worker: {self.problem}")
        return None

    def _slots_without_room(self) -> set[int]:
        return self.no_room & set(range(self.target))

    def _reasons(self) -> str:
        return "; ".join(f"slot {slot}: {reason}" for slot, reason in sorted(self.given_up.items()))

    def waits_for(self) -> str:
        """Why the requested trajectories are not finished yet, in one line."""
        serving = self.serving()
        if not serving:
            coming = ", ".join(f"{w.id} is {w.state}" for w in self.describe()) or "none is starting"
            ends = "; ".join(dict.fromkeys(self.last_end.values()))
            why = self.problem or (f"the last one ended by {ends}" if ends else "")
            return f"no rollout worker serves: {coming}" + (f" ({why})" if why else "")
        searching = [f"{m.id}: {m.info.waits_for}" for m in serving if m.info.waits_for]
        running = counted(sum(m.running for m in serving), "trajectory", "trajectories")
        return "; ".join([f"{running} on {counted(len(serving), 'rollout worker')}", *searching])

    # -- what happens to workers

    def join(self, member: Member) -> None:
        """A worker that holds the weights in force serves from now on."""
        member.become(WorkerState.READY)
        self.members[member.slot] = member
        self.note(
            {
                "event": "worker_join",
                "worker": member.id,
                "pid": member.info.pid,
                "node": member.info.node,
                "version": member.version,
            }
        )
        self.changed()

    def take_out(self, member: Member) -> None:
        """Give it nothing new; it finishes what it runs."""
        if self.members.get(member.slot) is member:
            del self.members[member.slot]
        self.leaving.add(member)
        member.become(WorkerState.DRAINING)
        self.note({"event": "worker_drain", "worker": member.id})
        self.changed()

    def move(self, member: Member, slot: int) -> None:
        """Into a slot without a worker, whose past was another worker's."""
        del self.members[member.slot]
        self.given_up.pop(slot, None)
        del self.crashes[slot]
        member.slot = slot
        self.members[slot] = member

    def finished(self, member: Member, trajectories: int) -> None:
        """A worker that finishes trajectories is no part of a crash loop."""
        self.crashes[member.slot] = 0
        member.timeouts = 0
        member.trajectories += trajectories

    def lose(self, member: Member, error: BaseException) -> None:
        """A worker is dead, or as good as dead: take it out, and have what it ran run elsewhere. Membership
        starts its successor at its next look."""
        # Found out twice, as by a ping and by a trajectory.
        if member.lost is not None:
            return
        if not isinstance(error, WorkerLostError):
            member.lost = WorkerLostError(f"worker {member.id}: {error}")
        else:
            member.lost = error
        if self.members.get(member.slot) is member:
            del self.members[member.slot]
            self.crashes[member.slot] += 1
            self.last_end[member.slot] = one_line(error)
        self.leaving.discard(member)
        member.become(WorkerState.FAILED)
        member.worker.kill()
        self.note(
            {"event": "worker_lost", "worker": member.id, "pid": member.info.pid, "reason": one_line(error)}
        )
        # The pool runs the cancelled trajectories again elsewhere; the state must be `failed` by then.
        for task in list(member.jobs.values()):
            task.cancel()
        self.changed()
