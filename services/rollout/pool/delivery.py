"""How new weights reach the workers of a pool, and which version is in force.

a sync      receivers() -> the learner offers and sends, sync(update) at the same time -> those that hold the version whole serve
a joiner    nccl, gloo: takes the weights from a worker that holds them whole, which goes on serving; where there is none it is `waiting`,
            and the learner must send again (`wants_learner`). shared_memory: takes them from the object store
a loss      in mid-broadcast: whoever is to blame leaves the pool, the others are told to stop, and GroupBrokenError says: send again
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from services.contracts import WeightsReceiver, WeightUpdate
from services.rollout.errors import WorkerLostError
from services.rollout.pool.member import Member, one_line
from services.settings import WeightSyncSettings
from services.weight_sync import GroupBrokenError, WeightsGoneError, WeightSyncError, untouched
from services.weight_sync.group import Ticket, break_group

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
    """The weights' part of a pool. `members` are its workers that have joined; `lose` takes one out. `parts`,
    `gpus`: of one worker."""

    def __init__(
        self,
        sync: WeightSyncSettings,
        *,
        members: Callable[[], list[Member]],
        lose: Callable[[Member, BaseException], None],
        check_hope: Callable[[], None],
        on_event: Callable[[dict], None],
        on_change: Callable[[], None],
        parts: int,
    ):
        self._settings, self._members, self._lose, self._check_hope = sync, members, lose, check_hope
        self._on_event, self._on_change, self._parts = on_event, on_change, parts
        self.version = 0
        self.update: WeightUpdate | None = None
        """The last one; None before the first sync, when workers serve the model's own weights."""
        self.waiting: set[Member] = set()
        """Workers that run, and have not joined for want of weights."""
        self._loans: dict[Member, Loan] = {}
        self._failed_loans: Counter[Member] = Counter()
        self._syncing = asyncio.Lock()
        self._sync_comes_until = 0.0
        """Time (monotonic) until which a sync that was announced by `receivers` is expected: no loan begins
        before it."""
        self._again_until = 0.0
        """Time (monotonic) until which the learner is expected to send once more what a broken group left
        half written."""
        self._arrived = asyncio.Event()

    @property
    def expects_weights(self) -> bool:
        """Whether a sync was announced, or must follow one whose group broke: workers without whole weights
        may hope."""
        return time.monotonic() < max(self._sync_comes_until, self._again_until)

    @property
    def wants_learner(self) -> bool:
        """Whether a worker waits for weights that no other worker can lend it."""
        if self._sync_comes or self._loans:
            return False
        return any(self._failed_loans[m] >= LOANS or not self._lenders() for m in self.waiting)

    @property
    def _sync_comes(self) -> bool:
        return self._syncing.locked() or time.monotonic() < self._sync_comes_until

    async def receivers(self, version: int) -> list[WeightsReceiver]:
        """The workers that are to be sent `version`. Loans end: their takers are among them. Raises
        WeightSyncError for an older version."""
        self._check_newer(version)
        self._sync_comes_until = time.monotonic() + self._settings.timeout_seconds
        loans = list(self._loans.values())
        for loan in loans:
            loan.task.cancel()
        await asyncio.gather(*(loan.task for loan in loans), return_exceptions=True)
        return [WeightsReceiver(m.id, self._parts, m.gpus) for m in self._needing(version)]

    def no_sync_comes(self) -> None:
        """What `receivers` announced is off, as where the learner was lost before it sent: nobody must wait
        for it."""
        self._sync_comes_until = 0.0

    def _needing(self, version: int) -> list[Member]:
        joined = [
            m for m in self._members() if self.update is None or m.version < version or m.state == "failed"
        ]
        # By name, not in the order in which they happened to join: the same workers are then the same group.
        return [m for some in (joined, self.waiting) for m in sorted(some, key=lambda m: m.id)]

    def _check_newer(self, version: int) -> None:
        if version < self.version:
            raise WeightSyncError(f"version {version} is not newer than {self.version}: versions only go up")

    async def sync(self, update: WeightUpdate) -> None:
        """Bring a version to the workers that it was offered to; see RolloutPool.sync."""
        self._sync_comes_until = self._again_until = 0.0
        async with self._syncing:
            self._check_newer(update.version)
            group = update.payload if isinstance(update.payload, Ticket) else None
            if group is not None:
                members = [m for m in [*self._members(), *self.waiting] if m.id in group.ranks]
            elif self.update is not None and update.version == self.version and not self.waiting:
                raise WeightSyncError(
                    f"version {update.version} is not newer than {self.version}: versions only go up"
                )
            else:
                members = self._needing(update.version)
            before = {m: m.state for m in members if m not in self.waiting}
            for m in before:
                m.state = "syncing"
            if group is not None and (gone := sorted(group.ranks.keys() - {m.id for m in members})):
                # It was lost or drained since the offer: the others would wait for it until their timeout.
                await self._stop_others(
                    group, WorkerLostError(f"worker {', '.join(gone)} left before the weights came")
                )
            if not members and not self.waiting:
                self._check_hope()
            results = await asyncio.gather(
                *(self._give(m, update, group) for m in members), return_exceptions=True
            )
            failed = {m: r for m, r in zip(members, results, strict=True) if isinstance(r, BaseException)}
            for m, state in before.items():
                if m.state != "syncing":
                    continue  # it was drained or lost meanwhile
                e = failed.get(m)
                m.state = state if untouched(e) else "ready" if e is None else "failed"
            self._settle(update, members, failed)
        self._arrived.set()
        self._on_change()

    def _settle(
        self, update: WeightUpdate, members: list[Member], failed: dict[Member, BaseException]
    ) -> None:
        """After a sync: which version is in force, who is lost, who must be sent the version again."""
        for m, e in failed.items():
            self._on_event(
                {"event": "sync_failed", "worker": m.id, "version": update.version, "reason": one_line(e)}
            )
        took = len(failed) < len(members)
        broken = [m for m, e in failed.items() if isinstance(e, GroupBrokenError)]
        if broken:
            self._again_until = time.monotonic() + self._settings.timeout_seconds
        if took:
            lost = [m for m in failed if m not in broken]
        else:  # where all refuse, the weights are to blame and not the workers
            lost = [m for m, e in failed.items() if not isinstance(e, WeightSyncError)]
        refused = [m for m in failed if m not in lost and m not in broken]
        if took or not (refused or broken):
            self.update, self.version = update, update.version
        for m in lost:
            self._lose(m, failed[m])  # its successor takes the version in force before it joins
        if not broken and not refused:
            if failed and not took:
                self._check_hope()
            return
        self._on_change()
        if broken:
            raise GroupBrokenError(
                f"version {update.version} did not reach {', '.join(m.id for m in broken)}: {failed[broken[0]]}"
            )
        error = failed[refused[0]]
        raise WeightSyncError(f"no worker took version {update.version} of the weights: {error}") from error

    async def _give(self, member: Member, update: WeightUpdate, group: Ticket | None) -> None:
        limit = self._settings.timeout_seconds
        try:
            member.version = await member.call(
                "update_weights", update, timeout_seconds=limit + (SLACK_SECONDS if group else 0.0)
            )
        except TimeoutError:
            late = TimeoutError(
                f"worker {member.id} did not take version {update.version} within weight_sync.timeout_seconds={limit:g}"
            )
            await self._stop_others(group, late)
            raise late from None
        except WeightSyncError:
            raise  # the group knows
        except Exception as e:
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
            # Who joined in mid-sync would hold the version before it, and idle until the next one.
            while self._sync_comes or self._lacks(member):
                if member.lost is not None:
                    raise member.lost
                from_group = self.update is not None and isinstance(self.update.payload, Ticket)
                if from_group and self._lacks(member) and member not in self.waiting:
                    self.waiting.add(member)
                    member.state = "waiting"
                lenders = self._lenders()
                if self._sync_comes:
                    await self._something_changes()
                elif not from_group:
                    await self._fetch(member, self.update)
                elif lenders and self._failed_loans[member] < LOANS:
                    await self._borrow(member, lenders[0])
                else:
                    await self._something_changes()
        finally:
            self.waiting.discard(member)
            del self._failed_loans[member]

    def _lacks(self, member: Member) -> bool:
        return self.update is not None and (member.version < self.version or member.state == "failed")

    async def _fetch(self, member: Member, update: WeightUpdate) -> None:
        """From the object store; where it lost them with their learner, wait until its successor sends
        others."""
        try:
            await self._give(member, update, None)
        except WeightsGoneError as e:
            self._on_event(
                {
                    "event": "weights_gone",
                    "worker": member.id,
                    "version": update.version,
                    "reason": one_line(e),
                }
            )
            self.waiting.add(member)
            member.state = "waiting"
            while self.update is update and member.lost is None:
                await self._something_changes()

    async def _something_changes(self) -> None:
        self._arrived.clear()
        try:
            await asyncio.wait_for(self._arrived.wait(), LOOK_SECONDS)
        except TimeoutError:
            return

    def _lenders(self) -> list[Member]:
        """Workers that hold the version in force, the least loaded first; not those that lend already."""
        busy = {loan.lender for loan in self._loans.values()}
        whole = [
            m for m in self._members() if m.state == "ready" and m.version == self.version and m not in busy
        ]
        return sorted(whole, key=lambda m: m.outstanding_tokens)

    async def _borrow(self, member: Member, lender: Member) -> None:
        # A task of its own, so that a sync can end the loan and not the joiner.
        loan = self._loans[member] = Loan(lender, asyncio.create_task(self._lend(member, lender)))
        try:
            await asyncio.shield(asyncio.wait([loan.task]))
        except asyncio.CancelledError:
            loan.task.cancel()
            raise
        finally:
            del self._loans[member]
        if loan.task.cancelled():
            return  # a sync is coming, and brings the weights
        error = loan.task.exception()
        if isinstance(error, WeightSyncError):
            event = {
                "event": "loan_failed",
                "worker": member.id,
                "lender": lender.id,
                "reason": one_line(error),
            }
            self._on_event(event)
            self._failed_loans[member] += 1
            await self._something_changes()
        elif error is not None:
            raise error

    async def _lend(self, member: Member, lender: Member) -> None:
        limit, began = self._settings.timeout_seconds, time.monotonic()
        offer = (WeightsReceiver(member.id, self._parts, member.gpus), self.version, self.update.backend)
        try:
            update = await lender.call("offer_weights", *offer, timeout_seconds=limit)
        except (WorkerLostError, TimeoutError) as e:
            raise GroupBrokenError(f"worker {lender.id} could not lend its weights: {one_line(e)}") from e
        given = asyncio.create_task(
            lender.call("lend_weights", update, timeout_seconds=limit + SLACK_SECONDS)
        )
        try:
            await self._give(member, update, update.payload)
        except BaseException as e:
            await self._stop_others(update.payload, e)
            raise
        finally:
            # Its own error is the taker's too, or does not matter: the taker holds all.
            await asyncio.gather(given, return_exceptions=True)
        event = {"event": "weights_lent", "worker": member.id, "lender": lender.id, "version": update.version}
        self._on_event(event | {"seconds": round(time.monotonic() - began, 3)})
