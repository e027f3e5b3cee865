"""The pool of rollout workers: it spreads trajectories over them, and runs again elsewhere what one did not
finish.

    driver -> RolloutPool   trajectories    ─┐
              Membership    starts, replaces ├─> Roster -> w0.1, w1.1, ...   Ray actors: agent loops + engine
              Delivery      weights         ─┘

The caller sees each uid once, in the order of its requests, whichever workers came and went meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Literal

from retriever_service.client import RetrieverUnavailable
from services.common.errors import EnvironmentLacks
from services.contracts import Trajectory, TrajectoryRequest, WeightsReceiver, WeightUpdate, WorkerInfo
from services.rollout.errors import WorkerLostError, WorkerUnavailableError
from services.rollout.pool.delivery import Delivery
from services.rollout.pool.member import Job, Member, wait_at_most
from services.rollout.pool.membership import GRACE_SECONDS, HEARTBEAT_SECONDS, Membership, back_off
from services.rollout.pool.placement import WorkerArguments
from services.rollout.pool.roster import Roster
from services.rollout.pool.worker_handle import one_line
from services.settings import RolloutSettings, WeightSyncSettings

JOBS_PER_WORKER = 256
"""Trajectories that a worker is given at a time; the rest waits here, for whoever is free or joins."""
ATTEMPTS = 5
"""Times that one trajectory is run before its error is the caller's."""
SPEED_SECONDS = 30.0
"""Time over which the speed is measured."""
WRITTEN = 100_000
"""Most trajectories that are remembered for the speed."""
TIMEOUTS = 3
"""Trajectories that may run past their deadline on a worker in a row before it is taken for dead."""

_ELSEWHERE = (
    WorkerLostError,
    WorkerUnavailableError,
    RetrieverUnavailable,
    TimeoutError,
)
"""Errors of a worker or of the moment: the trajectory is run again."""


class RolloutPool:
    """See the module. All methods belong to one event loop. `on_event` is told of joins, losses, retries and
    failures, as flat dicts.
    learner_gpus: GPUs that workers="all" leaves to the learner."""

    def __init__(
        self,
        settings: RolloutSettings,
        *,
        model_path: str,
        retriever_url: str,
        retriever_timeout_seconds: float,
        on_event: Callable[[dict[str, Any]], None],
        sync: WeightSyncSettings | None = None,
        learner_gpus: int = 0,
    ):
        sync = sync or WeightSyncSettings()
        arguments = WorkerArguments(model_path, retriever_url, retriever_timeout_seconds, sync)
        self._settings = settings
        self._roster = Roster(settings, on_event=on_event, on_change=self._dispatch)
        self._delivery = Delivery(sync, self._roster, parts=settings.tensor_parallel)
        self._membership = Membership(self._roster, self._delivery, arguments, learner_gpus=learner_gpus)
        self._pending: deque[Job] = deque()
        self._open: set[Job] = set()
        self._homes: dict[tuple[str, int], Member] = {}
        self._mean_tokens: dict[str, float] = {}
        self.trajectories = 0
        """Number of trajectories that were finished."""
        self._written: deque[tuple[float, int]] = deque(maxlen=WRITTEN)
        self._change = asyncio.Event()
        self._pauses: set[asyncio.Task] = set()

    async def start(self, beside: Callable[[], Awaitable[None]] | None = None) -> None:
        """Start the configured number of workers. Raises EnvironmentLacks, which names the
        worker or the resources that are missing, and a worker's own errors. beside: awaited too, called once
        each worker has its room on the cluster; its errors are raised."""
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            await self._membership.start(beside)
            undo.pop_all()

    async def close(self) -> None:
        """End all workers and their engines. May be called again; what still runs fails with
        EnvironmentLacks."""
        for job in list(self._open):
            if not job.future.done():
                job.future.set_exception(EnvironmentLacks("the rollout pool was closed"))
        self._pending.clear()
        tasks = [*self._pauses, *(task for m in self._roster.all() for task in m.jobs.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._membership.close()

    def workers(self) -> list[WorkerInfo]:
        """All workers, those that start or leave included."""
        return self._roster.describe()

    @property
    def target(self) -> int:
        """Workers wanted."""
        return self._roster.target

    @property
    def follows_cluster(self) -> bool:
        """True where `target` follows the cluster's resources."""
        return self._membership.follows_cluster

    @property
    def problem(self) -> str | None:
        """Why there are fewer workers than wanted, where that does not pass by itself."""
        return self._roster.problem

    def waits_for(self) -> str:
        """Why the requested trajectories are not finished yet, in one line."""
        return self._roster.waits_for()

    def lacking(self, n: int, held: Mapping[str, float]) -> str | None:
        """Demand of `n` workers against supply, in one line; None where the cluster could hold them all
        beside the run's other resources, which are `held` (`LearnerGroup.held`)."""
        return self._membership.lacking(n, held)

    async def scale(self, n: int | Literal["all"]) -> None:
        """Want `n` workers from now on; "all": as many as the cluster allows, now and when nodes come and go.
        More: returns at once; they join once they hold the current weights. Fewer: returns when the last ones
        have finished what they run. 0: trajectories that still wait fail with EnvironmentLacks."""
        if n != "all" and n < 0:
            raise ValueError(f"the number of workers can't be negative; got {n}")
        await self._membership.scale(n)

    def drain(self, id: str) -> Coroutine[Any, Any, None]:
        """Let a worker finish what it runs, then end it; from the call on the pool wants one worker fewer.
        Raises KeyError for an unknown worker."""
        return self._membership.drain(id)

    def waits(self) -> list[tuple[str, Any]]:
        """Of each worker its id, and a Ray reference to a text: the places where its tasks wait."""
        return [(m.id, m.worker.stacks()) for m in self._roster.all()]

    async def receivers(self, version: int) -> list[WeightsReceiver]:
        """The workers that are to be offered `version`: all that do not hold it whole. Raises WeightSyncError
        for an older version."""
        return await self._delivery.receivers(version)

    @property
    def wants_weights(self) -> bool:
        """True where workers wait for the version in force and only the learner can give it to them: sync it
        again."""
        return self._delivery.wants_learner

    async def sync(self, update: WeightUpdate) -> None:
        """Bring a version of the weights to the workers it was offered to; from then on only those that hold
        it serve.

        A worker that fails is replaced, and its successor catches up by itself. Raises WeightSyncError where
        the version is not newer, or no
        worker took it: then the old version stays in force, and workers that still hold it whole go on with
        it. Raises GroupBrokenError where a worker that is not to blame did not get it whole: offer it and
        send it again.
        """
        await self._delivery.sync(update)

    async def sleep(self) -> None:
        """Give the GPUs to the learner (`rollout.share_gpus`). Nothing may be running."""
        await self._membership.sleep()

    async def wake(self) -> None:
        """Take the GPUs back; call `sync` next."""
        await self._membership.wake()

    async def logprobs(
        self, worker_id: str, ids: list[list[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        """Log-probs that a worker gives to tokens, under the weights it holds now. Raises KeyError for an
        unknown worker."""
        member = self._roster.get(worker_id)
        limit = self._settings.trajectory_timeout_seconds
        return await member.worker.logprobs(ids, temperature, timeout_seconds=limit)

    async def rollout(
        self, requests: list[TrajectoryRequest], on_done: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        """Sample all requests; trajectories in their order. `on_done` is told of each as it finishes.

        Raises EnvironmentLacks where no worker will serve, a trajectory's own error, and errors of the place
        or moment that came ATTEMPTS times (RetrieverUnavailable, TimeoutError, ...).
        """
        repeated = [uid for uid, n in Counter(r.uid for r in requests).items() if n > 1]
        if repeated:
            raise ValueError(f"uids must be unique; {repeated[0]} comes more than once")
        if self._settings.deterministic:
            return await self._rollout_in_lockstep(requests, on_done)
        jobs = self._make_jobs(requests)
        for job in jobs:
            if on_done is not None:
                job.future.add_done_callback(
                    lambda f: on_done(f.result()) if not f.cancelled() and not f.exception() else None
                )
        self._open.update(jobs)
        self._pending.extend(jobs)
        self._dispatch()
        try:
            return list(await asyncio.gather(*(job.future for job in jobs)))
        finally:
            # One job has failed for good, or the caller was cancelled: nobody wants the others any more.
            self._open.difference_update(jobs)
            abandoned = {job.request.uid for job in jobs if not job.future.done() or job.future.cancelled()}
            for job in jobs:
                job.future.cancel()
            for member in self._roster.all():
                for uid in abandoned & member.jobs.keys():
                    member.jobs[uid].cancel()

    def _make_jobs(self, requests: list[TrajectoryRequest]) -> list[Job]:
        """Groups stay together, but one larger than a worker's share is split, or workers would idle."""
        share = math.ceil(len(requests) / max(1, self._roster.target))
        seen: Counter[str] = Counter()
        jobs = []
        for request in requests:
            home = (request.group, seen[request.group] // share)
            seen[request.group] += 1
            jobs.append(Job(request, asyncio.get_running_loop().create_future(), home))
        return jobs

    def _dispatch(self) -> None:
        """Give what waits to workers that serve, the least loaded first."""
        self._change.set()
        free = [m for m in self._roster.serving() if len(m.jobs) < JOBS_PER_WORKER]
        while self._pending and free:
            job = self._pending.popleft()
            if job.future.done():
                continue
            # The same worker for a group: its prefix cache holds the group's prompt.
            member = self._homes.get(job.home)
            if member is None or member not in free or member is job.avoid:
                others = [m for m in free if m is not job.avoid]
                member = min(others or free, key=lambda m: m.outstanding_tokens)
                self._homes[job.home] = member
            # Counted now and not when it runs: the next job of this loop must see the load.
            member.outstanding_tokens += self._expected_tokens(job.request)
            self._start_job(member, job)
            if len(member.jobs) >= JOBS_PER_WORKER:
                free.remove(member)
        if not self._pending:
            self._homes.clear()
            return
        if (error := self._roster.why_nobody_can_serve()) is not None:
            while self._pending:
                self._fail(self._pending.popleft(), error)

    def _start_job(self, member: Member, job: Job) -> None:
        begun = False

        async def run() -> None:
            nonlocal begun
            begun = True
            await self._run(member, job)

        def ended(_: asyncio.Task) -> None:
            # Cancelled before its first step, as where two workers are lost at once: `_run`, which takes care
            # of all else, has not begun.
            if not begun:
                member.jobs.pop(job.request.uid, None)
                self._cut_short(member, job)
                self._dispatch()

        task = asyncio.create_task(run())
        member.jobs[job.request.uid] = task
        task.add_done_callback(ended)

    async def _run(self, member: Member, job: Job) -> None:
        expected = self._expected_tokens(job.request)
        try:
            # The worker's own limit comes first: its error names what was waited for.
            limit = self._settings.trajectory_timeout_seconds + GRACE_SECONDS
            asked = time.monotonic()
            trajectory = await member.worker.rollout(job.request, timeout_seconds=limit)
            trajectory.round_trip = (asked, time.monotonic())
        except asyncio.CancelledError:
            self._cut_short(member, job)
        except Exception as e:
            if isinstance(e, _ELSEWHERE):
                self._run_again(member, job, e)
            else:
                self._fail(job, e)
        else:
            self._finished(member, [trajectory])
            if not job.future.done():
                job.future.set_result(trajectory)
        finally:
            member.jobs.pop(job.request.uid, None)
            # The mean that `expected` comes from has moved since it was added, so that the sum drifts: an
            # idle worker has none.
            member.outstanding_tokens = max(0.0, member.outstanding_tokens - expected) if member.jobs else 0.0
            self._dispatch()

    def _cut_short(self, member: Member, job: Job) -> None:
        """The worker was lost, or it is leaving and did not finish in time, or the caller has gone."""
        if not job.future.done():
            leaving = WorkerUnavailableError(f"worker {member.id} is leaving")
            self._run_again(member, job, member.lost or leaving)

    def _run_again(self, member: Member, job: Job, error: BaseException) -> None:
        job.attempts += 1
        # Another worker next, where there is one: this one may be what is wrong.
        job.avoid = member
        self._note_retry(member, [job.request], job.attempts, error)
        if job.attempts >= ATTEMPTS:
            self._fail(job, error)
        # It is away for all workers: another one would ask it in vain at once.
        elif isinstance(error, RetrieverUnavailable):
            pause = asyncio.create_task(self._after_pause(job))
            self._pauses.add(pause)
            pause.add_done_callback(self._pauses.discard)
        else:
            self._pending.append(job)

    async def _after_pause(self, job: Job) -> None:
        await asyncio.sleep(back_off(job.attempts))
        self._pending.append(job)
        self._dispatch()

    def _fail(self, job: Job, error: BaseException) -> None:
        if not job.future.done():
            job.future.set_exception(error)

    def _expected_tokens(self, request: TrajectoryRequest) -> float:
        return self._mean_tokens.get(request.question.data_source, self._settings.max_response_tokens)

    def _finished(self, member: Member, trajectories: list[Trajectory]) -> None:
        self._roster.finished(member, len(trajectories))
        self.trajectories += len(trajectories)
        for t in trajectories:
            source = t.question.data_source
            tokens = sum(len(a.token_ids) for a in t.actions)
            self._mean_tokens[source] = 0.95 * self._mean_tokens.get(source, tokens) + 0.05 * tokens
            self._written.append((time.monotonic(), tokens))

    def tokens_per_s(self) -> float:
        """Tokens per second that the model wrote, in trajectories finished over the last SPEED_SECONDS."""
        began = time.monotonic() - SPEED_SECONDS
        while self._written and self._written[0][0] < began:
            self._written.popleft()
        return sum(tokens for _, tokens in self._written) / SPEED_SECONDS

    def _note_retry(
        self, member: Member, requests: list[TrajectoryRequest], attempt: int, error: BaseException
    ) -> None:
        for request in requests:
            self._roster.note(
                {
                    "event": "trajectory_retry",
                    "uid": request.uid,
                    "worker": member.id,
                    "attempt": attempt,
                    "reason": one_line(error),
                }
            )
        if isinstance(error, WorkerLostError):
            self._roster.lose(member, error)
        elif isinstance(error, TimeoutError):
            member.timeouts += 1
            if member.timeouts >= TIMEOUTS:
                said = f"worker {member.id}: {TIMEOUTS} trajectories in a row timed out; replacing it"
                self._roster.lose(member, WorkerLostError(said))

    # -- deterministic mode

    async def _rollout_in_lockstep(
        self, requests: list[TrajectoryRequest], on_done: Callable[[Trajectory], None] | None
    ) -> list[Trajectory]:
        """Groups go round the slots in their order; each slot runs its share as one batch, again from the
        start if its worker dies."""
        shares: dict[int, list[TrajectoryRequest]] = {}
        slots: dict[str, int] = {}
        for request in requests:
            slot = slots.setdefault(request.group, len(slots) % max(1, self._roster.target))
            shares.setdefault(slot, []).append(request)
        tasks = [asyncio.create_task(self._run_share(slot, share)) for slot, share in shares.items()]
        try:
            done = {
                trajectory.uid: trajectory for share in await asyncio.gather(*tasks) for trajectory in share
            }
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        ordered = [done[request.uid] for request in requests]
        if on_done is not None:
            for trajectory in ordered:
                on_done(trajectory)
        return ordered

    async def _run_share(self, slot: int, share: list[TrajectoryRequest]) -> list[Trajectory]:
        limit = self._settings.trajectory_timeout_seconds + GRACE_SECONDS
        attempt = 0
        while True:
            attempt += 1
            member = await self._serving_in(slot)
            asked = time.monotonic()
            call = asyncio.create_task(member.worker.rollout_batch(share, timeout_seconds=limit))
            member.jobs[share[0].uid] = call
            member.batch = len(share)
            try:
                done = await call
            except asyncio.CancelledError:
                # Either this task is cancelled, or `Roster.lose` has cancelled the call that it awaits.
                call.cancel()
                own = asyncio.current_task()
                if member.lost is None or (own is not None and own.cancelling()):
                    raise
                error: BaseException = member.lost
            except _ELSEWHERE as e:
                error = e
            else:
                for trajectory in done:
                    trajectory.round_trip = (asked, time.monotonic())
                self._finished(member, done)
                return done
            finally:
                member.jobs.pop(share[0].uid, None)
                member.batch = 0
            self._note_retry(member, share, attempt, error)
            if attempt >= ATTEMPTS:
                raise error
            if isinstance(error, RetrieverUnavailable):
                await asyncio.sleep(back_off(attempt))

    async def _serving_in(self, slot: int) -> Member:
        """The worker of a slot, once it serves."""
        while True:
            self._change.clear()
            for member in self._roster.serving():
                if member.slot == slot:
                    return member
            self._roster.raise_if_no_worker_can_serve(slot)
            await wait_at_most(self._change, HEARTBEAT_SECONDS)
