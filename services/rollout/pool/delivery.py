"""Delivery of new weights to the workers of a pool, and the version in force.

a sync      `receivers()` -> the learner offers and sends, `sync(update)` at the same time -> workers that
            hold the whole version serve
a joiner    nccl, gloo: it takes the weights from a worker that holds them whole and serves on. Where there is
            none, the joiner is `waiting`, and the learner must send again (`wants_learner`).
            shared_memory: it takes the weights from the object store
a loss      in mid-broadcast: the worker to blame leaves the pool, the others are told to stop, and
            GroupBrokenError says: send again
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from services.contracts import WeightsReceiver, WeightUpdate
from services.rollout.errors import WorkerLostError
from services.rollout.pool.member import Member, wait_at_most
from services.rollout.pool.roster import Roster
from services.rollout.pool.worker_handle import one_line
from services.settings import WeightSyncSettings
from services.weight_sync import GroupBrokenError, WeightsGoneError, WeightSyncError, untouched
from services.weight_sync.group import Ticket, break_group
from services.worker_state import WorkerState

SLACK_SECONDS = 5.0
"""Beyond a group's own timeout, before a worker that has not answered is taken for dead: it names itself by
its silence."""
LOANS = 3
"""Loans that may fail before a joiner waits for the learner."""
LOOK_SECONDS = 0.5
"""Time between two looks of a joiner at who could lend it weights."""


@dataclass(eq=False)
class Loan:
    """Weights on their way from one worker to another."""

    lender: Member
    task: asyncio.Task


class Delivery:
    """The weights' part of a pool. `parts`: processes that hold a part of one worker's model."""

    def __init__(self, sync: WeightSyncSettings, roster: Roster, *, parts: int):
        self._settings = sync
        self._roster = roster
        self._parts = parts
        self.update: WeightUpdate | None = None
        """The last one; None before the first sync, when workers serve the model's own weights."""
        self._loans: dict[Member, Loan] = {}
        self._failed_loans: Counter[Member] = Counter()
        self._syncing = asyncio.Lock()
        self._arrived = asyncio.Event()

    @property
    def wants_learner(self) -> bool:
        """True where a worker waits for weights that no other worker can lend it."""
        if self._sync_comes or self._loans:
            return False
        lenders = self._lenders()
        return any(self._failed_loans[m] >= LOANS or not lenders for m in self._roster.waiting)

    @property
    def _sync_comes(self) -> bool:
        return self._syncing.locked() or time.monotonic() < self._roster.sync_expected_until

    async def receivers(self, version: int) -> list[WeightsReceiver]:
        """The workers that are to be sent `version`. Loans end: their takers are among them. Raises
        WeightSyncError for an older version."""
        self._check_not_older(version)
        # While it is expected, no joiner borrows from a worker.
        self._roster.sync_expected_until = time.monotonic() + self._settings.timeout_seconds
        # A taker that is busy with a loan could not come to the group that the learner makes now.
        loans = list(self._loans.values())
        for loan in loans:
            loan.task.cancel()
        await asyncio.gather(*(loan.task for loan in loans), return_exceptions=True)
        return [self._receiver(m) for m in self._needing(version)]

    def _receiver(self, member: Member) -> WeightsReceiver:
        return WeightsReceiver(member.id, self._parts, member.gpus)

    def no_sync_comes(self) -> None:
        """The sync that `receivers` announced is off, as where the learner was lost before it sent: nobody
        must wait for it."""
        self._roster.sync_expected_until = 0.0

    def _needing(self, version: int) -> list[Member]:
        everyone = self.update is None
        joined = [
            m
            for m in self._roster.joined()
            if everyone or m.version < version or m.state is WorkerState.FAILED
        ]
        # By name, not in the order in which they happened to join: the same workers are then the same group.
        return [m for some in (joined, self._roster.waiting) for m in sorted(some, key=lambda m: m.id)]

    def _check_not_older(self, version: int) -> None:
        if version < self._roster.version:
            raise self._not_newer(version)

    def _not_newer(self, version: int) -> WeightSyncError:
        return WeightSyncError(
            f"version {version} is not newer than {self._roster.version}: versions only go up"
        )

    # -- a sync

    async def sync(self, update: WeightUpdate) -> None:
        """Bring a version to the workers that it was offered to; see RolloutPool.sync."""
        roster = self._roster
        roster.sync_expected_until = 0.0
        roster.resend_expected_until = 0.0
        async with self._syncing:
            self._check_not_older(update.version)
            group = update.payload if isinstance(update.payload, Ticket) else None
            members = self._takers(update, group)
            # Those that wait take part too, and stay `waiting`: `catch_up` lets them join afterwards.
            before = {m: m.state for m in members if m not in roster.waiting}
            for m in before:
                m.become(WorkerState.SYNCING)
            if group is not None and (gone := sorted(group.ranks.keys() - {m.id for m in members})):
                # It was lost or drained since the offer: the others would wait for it until their timeout.
                error = WorkerLostError(f"worker {', '.join(gone)} left before the weights came")
                await self._stop_others(group, error)
            if not members and not roster.waiting:
                roster.raise_if_no_worker_can_serve()
            results = await asyncio.gather(
                *(self._send(m, update, group) for m in members), return_exceptions=True
            )
            failed = {m: r for m, r in zip(members, results, strict=True) if isinstance(r, BaseException)}
            _end_sync(before, failed)
            self._settle(update, members, failed)
        self._arrived.set()
        roster.changed()

    def _takers(self, update: WeightUpdate, group: Ticket | None) -> list[Member]:
        """The workers that are to take an update. Raises WeightSyncError where all hold its version."""
        roster = self._roster
        if group is not None:
            return [m for m in [*roster.joined(), *roster.waiting] if m.id in group.ranks]
        if self.update is not None and update.version == roster.version and not roster.waiting:
            raise self._not_newer(update.version)
        return self._needing(update.version)

    def _settle(
        self, update: WeightUpdate, members: list[Member], failed: Mapping[Member, BaseException]
    ) -> None:
        """After a sync: which version is in force, who is lost, who must be sent the version again."""
        roster = self._roster
        for m, e in failed.items():
            roster.note(
                {"event": "sync_failed", "worker": m.id, "version": update.version, "reason": one_line(e)}
            )
        # One worker that took the version proves the weights good: whoever failed is then to blame itself.
        took = len(failed) < len(members)
        broken = [m for m, e in failed.items() if isinstance(e, GroupBrokenError)]
        if broken:
            roster.resend_expected_until = time.monotonic() + self._settings.timeout_seconds
        if took:
            lost = [m for m in failed if m not in broken]
        else:  # where all refuse, the weights are to blame and not the workers
            lost = [m for m, e in failed.items() if not isinstance(e, WeightSyncError)]
        refused = [m for m in failed if m not in lost and m not in broken]
        # In force even where every taker was lost: their successors take it before they join.
        if took or not (refused or broken):
            self.update = update
            roster.version = update.version
        for m in lost:
            roster.lose(m, failed[m])  # its successor takes the version in force before it joins
        if not broken and not refused:
            if failed and not took:
                roster.raise_if_no_worker_can_serve()
            return
        roster.changed()
        if broken:
            names = ", ".join(m.id for m in broken)
            raise GroupBrokenError(f"version {update.version} did not reach {names}: {failed[broken[0]]}")
        error = failed[refused[0]]
        raise WeightSyncError(f"no worker took version {update.version} of the weights: {error}") from error

    async def _send(self, member: Member, update: WeightUpdate, group: Ticket | None) -> None:
        limit = self._settings.timeout_seconds
        try:
            member.version = await member.worker.update_weights(
                update, timeout_seconds=limit + (SLACK_SECONDS if group else 0.0)
            )
        except TimeoutError:
            late = TimeoutError(
                f"worker {member.id} did not take version {update.version} "
                f"within weight_sync.timeout_seconds={limit:g}"
            )
            await self._stop_others(group, late)
            raise late from None
        except Exception as e:
            if not isinstance(e, WeightSyncError):  # of which the group knows
                await self._stop_others(group, e)
            raise

    async def _stop_others(self, group: Ticket | None, error: BaseException) -> None:
        if group is not None:
            await asyncio.to_thread(break_group, group, one_line(error))

    # -- joiners

    async def catch_up(self, member: Member) -> None:
        """Give a worker that has just started the weights in force. Raises WorkerLostError, TimeoutError, and
        the worker's own errors."""
        try:
            # A worker that joined in mid-sync would hold the version before it, and idle until the next one.
            while self._sync_comes or self._needs_weights(member):
                if member.lost is not None:
                    raise member.lost
                await self._try_to_catch_up(member)
        finally:
            self._roster.waiting.discard(member)
            del self._failed_loans[member]

    async def _try_to_catch_up(self, member: Member) -> None:
        """One attempt to get the weights in force, or one look at whether they could be had."""
        update = self.update
        from_group = update is not None and isinstance(update.payload, Ticket)
        if from_group and self._needs_weights(member):
            self._wait_for_weights(member)
        lenders = self._lenders()
        if self._sync_comes or update is None:
            await self._wait_for_change()
        elif not from_group:
            await self._fetch(member, update)
        elif lenders and self._failed_loans[member] < LOANS:
            await self._borrow(member, lenders[0], update.backend)
        else:
            await self._wait_for_change()

    def _wait_for_weights(self, member: Member) -> None:
        if member.lost is not None:  # a ping found out while the weights were sent
            raise member.lost
        self._roster.waiting.add(member)
        member.become(WorkerState.WAITING)

    def _needs_weights(self, member: Member) -> bool:
        if self.update is None:
            return False
        return member.version < self._roster.version or member.state is WorkerState.FAILED

    async def _fetch(self, member: Member, update: WeightUpdate) -> None:
        """From the object store; where it lost the weights with their learner, wait until the learner's
        successor sends others."""
        try:
            await self._send(member, update, None)
        except WeightsGoneError as e:
            self._roster.note(
                {
                    "event": "weights_gone",
                    "worker": member.id,
                    "version": update.version,
                    "reason": one_line(e),
                }
            )
            self._wait_for_weights(member)
            while self.update is update and member.lost is None:
                await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        self._arrived.clear()
        await wait_at_most(self._arrived, LOOK_SECONDS)

    def _lenders(self) -> list[Member]:
        """Workers that hold the version in force, the least loaded first; not those that lend already."""
        busy = {loan.lender for loan in self._loans.values()}
        return sorted(
            (m for m in self._roster.serving() if m not in busy), key=lambda m: m.outstanding_tokens
        )

    async def _borrow(self, member: Member, lender: Member, backend: str) -> None:
        # A task of its own, so that a sync can end the loan and not the joiner.
        loan = Loan(lender, asyncio.create_task(self._lend(member, lender, backend)))
        self._loans[member] = loan
        try:
            await asyncio.wait([loan.task])
        finally:
            loan.task.cancel()  # does nothing, unless the joiner itself was cancelled
            del self._loans[member]
        if loan.task.cancelled():
            return  # a sync is coming, and brings the weights
        error = loan.task.exception()
        if isinstance(error, WeightSyncError):
            self._roster.note(
                {
                    "event": "loan_failed",
                    "worker": member.id,
                    "lender": lender.id,
                    "reason": one_line(error),
                }
            )
            # Of the joiner, not the lender: after some tries the learner has to send, whoever could lend.
            self._failed_loans[member] += 1
            await self._wait_for_change()
        elif error is not None:
            raise error

    async def _lend(self, member: Member, lender: Member, backend: str) -> None:
        limit = self._settings.timeout_seconds
        began = time.monotonic()
        try:
            update = await lender.worker.offer_weights(
                self._receiver(member), self._roster.version, backend, timeout_seconds=limit
            )
        except (WorkerLostError, TimeoutError) as e:
            raise GroupBrokenError(f"worker {lender.id} could not lend its weights: {one_line(e)}") from e
        # Both sides at once: the sender returns only after the taker has come.
        given = asyncio.create_task(lender.worker.lend_weights(update, timeout_seconds=limit + SLACK_SECONDS))
        try:
            await self._send(member, update, update.payload)
        except BaseException as e:
            await self._stop_others(update.payload, e)
            raise
        finally:
            # Its own error is the taker's too, or does not matter: the taker holds all.
            await asyncio.gather(given, return_exceptions=True)
        self._roster.note(
            {
                "event": "weights_lent",
                "worker": member.id,
                "lender": lender.id,
                "version": update.version,
                "seconds": round(time.monotonic() - began, 3),
            }
        )


def _end_sync(before: Mapping[Member, WorkerState], failed: Mapping[Member, BaseException]) -> None:
    """The state in which a sync leaves each worker that was in state `before`."""
    for member, state in before.items():
        if member.state is not WorkerState.SYNCING:
            continue  # it was drained or lost meanwhile
        error = failed.get(member)
        if error is None:
            member.become(WorkerState.READY)
        else:
            member.become(state if untouched(error) else WorkerState.FAILED)
