"""The pool of rollout workers: it spreads trajectories, replaces the dead, and lets workers come and go during a run.

    driver -> RolloutPool -> worker w0.1 (Ray actor: agent loops + engine)
                          -> worker w1.1
                          -> worker w1.2   the second incarnation in slot 1: its predecessor died

A worker serves only while it holds the pool's version of the weights, whole. A trajectory that did not finish is run again elsewhere under
the same uid: the caller sees each uid once.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError

from retriever_service.client import RetrieverUnavailable
from services.contracts import Trajectory, TrajectoryRequest, WeightUpdate, WorkerInfo
from services.rollout import placement
from services.rollout.engine import EngineDeadError, RequestAbortedError, WeightLoadError
from services.rollout.loop import RolloutError
from services.rollout.member import Job, Member
from services.rollout.worker import TrajectoryTimeoutError, WorkerUnavailableError
from services.settings import RolloutSettings, WeightSyncSettings
from services.weight_sync import WeightSyncError

HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 30.0
"""A worker that has not answered a ping for so long is taken for dead."""
JOBS_PER_WORKER = 256
"""Trajectories that a worker is given at a time; the rest waits here, for whoever is free or joins."""
ATTEMPTS = 5
"""Times that one trajectory is run before its error is the caller's."""
FIRST_BACK_OFF_SECONDS, LAST_BACK_OFF_SECONDS = 1.0, 30.0
CRASHES = 5
"""Workers of one slot that end without having finished a trajectory, before the slot is given up."""
GRACE_SECONDS = 10.0
"""Beyond a worker's own deadlines, before the pool's."""
CLOSE_SECONDS = 10.0

_LOST = (RayActorError, EngineDeadError)
_ELSEWHERE = (
    WorkerUnavailableError,
    TrajectoryTimeoutError,
    RequestAbortedError,
    WeightLoadError,
    RetrieverUnavailable,
    TimeoutError,
)


class NoWorkersError(RolloutError):
    """No rollout worker is left, and none will come."""

    exit_code = 3


class RolloutPool:
    """See the module. All methods belong to one event loop. `on_event` is told of joins, losses, retries and failures, as flat dicts."""

    def __init__(
        self,
        settings: RolloutSettings,
        *,
        model_path: str,
        retriever_url: str,
        retriever_timeout_seconds: float,
        on_event: Callable[[dict], None],
        sync: WeightSyncSettings | None = None,
    ):
        self._settings, self._on_event = settings, on_event
        self._sync_settings = sync or WeightSyncSettings()
        self._worker_arguments: dict[str, Any] = {
            "model_path": model_path,
            "retriever_url": retriever_url,
            "retriever_timeout_seconds": retriever_timeout_seconds,
            "sync": self._sync_settings,
        }
        self._target = 0
        self._members: dict[int, Member] = {}
        self._starting: dict[int, asyncio.Task] = {}
        self._incarnations: Counter[int] = Counter()
        self._crashes: Counter[int] = Counter()
        self._given_up: dict[int, str] = {}
        self._pending: deque[Job] = deque()
        self._home: dict[str, Member] = {}
        self._mean_tokens: dict[str, float] = {}
        self._update: WeightUpdate | None = None
        self._version = 0
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()
        self._closed = False

    # -- life ---------------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the configured number of workers. Raises UnschedulableError, EngineMissingError, or NoWorkersError naming the worker."""
        self._target = placement.count(self._settings, ray.cluster_resources())
        if self._target == 0:
            raise placement.UnschedulableError(f"rollout.workers=all found none: {placement.describe(self._settings, 1)}")
        try:
            await asyncio.gather(*(self._start_member(slot) for slot in range(self._target)))
        except BaseException:
            await self.close()
            raise
        self._spawn(self._watch())

    async def close(self) -> None:
        """End all workers and their engines. May be called again."""
        if self._closed:
            return
        self._closed = True
        tasks = [*self._tasks, *self._starting.values(), *(t for m in self._members.values() for t in m.jobs.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_jobs(NoWorkersError("the rollout pool was closed"))
        await asyncio.gather(*(self._end(m) for m in self._members.values()))
        self._members.clear()

    def workers(self) -> list[WorkerInfo]:
        """All workers, those that start included, by slot."""
        starting = [
            WorkerInfo(self._name(s), 0, "", 0, state="starting") for s in sorted(self._starting) if s not in self._members
        ]
        return sorted([*(m.describe() for m in self._members.values()), *starting], key=lambda w: w.id)

    async def scale(self, n: int) -> None:
        """Want `n` workers from now on. More: they start, and join once they hold the current weights. Fewer: the last ones are drained."""
        if n < 0:
            raise ValueError(f"the number of workers can't be negative; got {n}")
        self._target = n
        self._given_up.clear()
        self._crashes.clear()
        for slot in [s for s in self._starting if s >= n]:
            self._starting[slot].cancel()
        await asyncio.gather(*(self._retire(m) for slot, m in list(self._members.items()) if slot >= n))
        self._dispatch()
        self._changed.set()

    async def drain(self, id: str) -> None:
        """Let a worker finish what it runs (as long as one trajectory may take), then end it; the pool wants one worker fewer.

        Raises KeyError for an unknown worker.
        """
        member = next((m for m in self._members.values() if m.id == id), None)
        if member is None:
            raise KeyError(f"no rollout worker {id}; there are {', '.join(w.id for w in self.workers()) or 'none'}")
        last = max(self._members)
        self._target = max(0, self._target - 1)
        await self._retire(member)
        # Slots stay 0 .. target - 1, so the last worker takes the place of the one that left.
        if last in self._members and last != member.slot and last >= self._target:
            moved = self._members.pop(last)
            moved.slot = member.slot
            self._members[moved.slot] = moved
        self._dispatch()

    async def _retire(self, member: Member) -> None:
        if member.state == "draining":
            return
        member.state = "draining"
        self._on_event({"event": "worker_drain", "worker": member.id})
        if member.jobs:
            await asyncio.wait(list(member.jobs.values()), timeout=self._settings.trajectory_timeout_seconds + GRACE_SECONDS)
        if self._members.get(member.slot) is member:
            del self._members[member.slot]
            for task in member.jobs.values():
                task.cancel()
            await self._end(member)
            self._on_event({"event": "worker_left", "worker": member.id})

    async def _end(self, member: Member) -> None:
        try:
            await member.call("close", timeout_seconds=CLOSE_SECONDS)
        except (RayError, TimeoutError) as e:
            self._on_event({"event": "worker_close_failed", "worker": member.id, "reason": _reason(e)})
            member.kill()
        else:
            ray.kill(member.actor)

    # -- weights ------------------------------------------------------------------------------------------------------------------

    async def sync(self, update: WeightUpdate) -> None:
        """Bring a version of the weights to all workers; from then on only those that hold it serve.

        A worker that fails is replaced, and its successor catches up by itself. Raises WeightSyncError where the version is not newer, or no
        worker took it: then the old version stays in force, and workers that still hold it whole go on with it.
        """
        if update.version < self._version or (update.version == self._version and self._update is not None):
            raise WeightSyncError(
                f"version {update.version} is not newer than {self._version}, which the workers hold: versions only go up"
            )
        members = [m for m in self._members.values() if m.state != "starting"]
        if not members and not self._starting:
            raise NoWorkersError(self._why_none())
        states = {m: m.state for m in members}
        for m in members:
            m.state = "syncing"
        results = await asyncio.gather(*(self._send_weights(m, update) for m in members), return_exceptions=True)
        failed = {m: r for m, r in zip(members, results, strict=True) if isinstance(r, BaseException)}
        for m in members:
            if m not in failed:
                m.state = "draining" if states[m] == "draining" else "ready"
        for m, error in failed.items():
            self._on_event({"event": "sync_failed", "worker": m.id, "version": update.version, "reason": _reason(error)})
        if members and len(failed) == len(members):
            for m, error in failed.items():
                whole = isinstance(error, WeightSyncError) and states[m] in ("ready", "draining")
                m.state = states[m] if whole else "failed"
                if isinstance(error, _LOST):
                    self._lose(m, error)
            error = next(iter(failed.values()))
            raise WeightSyncError(f"no worker took version {update.version} of the weights: {_reason(error)}") from error
        self._update, self._version = update, update.version
        for m, error in failed.items():
            self._lose(m, error)
        self._dispatch()
        self._changed.set()

    async def _send_weights(self, member: Member, update: WeightUpdate) -> None:
        limit = self._sync_settings.timeout_seconds
        try:
            member.version = await member.call("update_weights", update, timeout_seconds=limit)
        except TimeoutError:
            raise TimeoutError(
                f"worker {member.id} did not take version {update.version} within weight_sync.timeout_seconds={limit:g}"
            ) from None

    async def logprobs(self, worker_id: str, ids: list[list[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log-probs that a worker gives to tokens, under the weights it holds now. Raises KeyError for an unknown worker."""
        member = next((m for m in self._members.values() if m.id == worker_id), None)
        if member is None:
            raise KeyError(f"no rollout worker {worker_id}")
        return await member.call("logprobs", ids, temperature, timeout_seconds=self._settings.trajectory_timeout_seconds)

    # -- trajectories -------------------------------------------------------------------------------------------------------------

    async def rollout(
        self, requests: list[TrajectoryRequest], on_done: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        """Sample all requests; trajectories in their order. `on_done` is told of each as it finishes.

        Raises NoWorkersError, RetrieverUnavailable (after ATTEMPTS outages of one trajectory), and a trajectory's own error.
        """
        repeated = [uid for uid, n in Counter(r.uid for r in requests).items() if n > 1]
        if repeated:
            raise ValueError(f"uids must be unique; {repeated[0]} comes more than once")
        if self._settings.deterministic:
            return await self._rollout_in_lockstep(requests, on_done)
        jobs = [Job(request, asyncio.get_running_loop().create_future()) for request in requests]
        for job in jobs:
            if on_done is not None:
                job.future.add_done_callback(lambda f: on_done(f.result()) if not f.cancelled() and not f.exception() else None)
        self._pending.extend(jobs)
        self._dispatch()
        try:
            return list(await asyncio.gather(*(job.future for job in jobs)))
        finally:
            for job in jobs:
                if not job.future.done():
                    job.future.cancel()
            for m in self._members.values():
                for uid in [j.request.uid for j in jobs if j.future.cancelled() and j.request.uid in m.jobs]:
                    m.jobs[uid].cancel()

    async def _rollout_in_lockstep(self, requests, on_done) -> list[Trajectory]:
        """Groups go round the slots in their order; each slot runs its share as one batch, again from the start if its worker dies."""
        shares: dict[int, list[TrajectoryRequest]] = {}
        places: dict[str, int] = {}
        for request in requests:
            slot = places.setdefault(request.group, len(places) % max(1, self._target))
            shares.setdefault(slot, []).append(request)
        tasks = [asyncio.create_task(self._run_share(slot, share)) for slot, share in shares.items()]
        try:
            done = {t.uid: t for share in await asyncio.gather(*tasks) for t in share}
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        ordered = [done[r.uid] for r in requests]
        for trajectory in ordered if on_done else ():
            on_done(trajectory)
        return ordered

    async def _run_share(self, slot: int, share: list[TrajectoryRequest]) -> list[Trajectory]:
        limit = self._settings.trajectory_timeout_seconds + GRACE_SECONDS
        for attempt in range(1, ATTEMPTS + 1):
            member = await self._serving(slot)
            try:
                done = await member.call("rollout_batch", share, timeout_seconds=limit)
            except (*_LOST, *_ELSEWHERE) as e:
                self._after_failure(member, e, share, attempt)
                if attempt == ATTEMPTS:
                    raise
            else:
                self._crashes[slot] = 0
                return done
        raise AssertionError("unreachable")

    async def _serving(self, slot: int) -> Member:
        """The worker of a slot, once it serves."""
        while True:
            self._changed.clear()
            member = self._members.get(slot)
            if member is not None and self._serves(member):
                return member
            if self._closed or slot >= self._target or slot in self._given_up:
                raise NoWorkersError(self._why_none())
            await self._changed.wait()

    def _serves(self, member: Member) -> bool:
        return member.state == "ready" and member.version == self._version

    def _dispatch(self) -> None:
        """Give waiting trajectories to workers: the samples of a group to one worker (its prefix cache), the least loaded one first."""
        if self._pending and not self._members and not self._starting and (self._closed or len(self._given_up) >= self._target):
            self._fail_jobs(NoWorkersError(self._why_none()))
        serving = [m for m in self._members.values() if self._serves(m)]
        if not serving:
            return
        per_group = Counter(job.request.group for job in self._pending)
        share = math.ceil(len(self._pending) / len(serving))
        given: Counter[str] = Counter()
        waiting: deque[Job] = deque()
        while self._pending:
            job = self._pending.popleft()
            if job.future.done():
                continue
            free = [m for m in serving if len(m.jobs) < JOBS_PER_WORKER]
            if not free:
                waiting.append(job)
                continue
            group = job.request.group
            home = self._home.get(group)
            # A group larger than a worker's share is split, or workers would idle.
            if home not in free or home is job.avoid or (given[group] >= share and per_group[group] > share):
                candidates = [m for m in free if m is not job.avoid] or free
                home = min(candidates, key=lambda m: (m.outstanding_tokens, m.slot))
                self._home[group], given[group] = home, 0
            given[group] += 1
            home.outstanding_tokens += self._expected_tokens(job.request)
            home.jobs[job.request.uid] = asyncio.create_task(self._run_job(home, job))
        self._pending = waiting
        if not waiting:
            self._home = {group: m for group, m in self._home.items() if given[group]}

    async def _run_job(self, member: Member, job: Job) -> None:
        expected = self._expected_tokens(job.request)
        try:
            limit = self._settings.trajectory_timeout_seconds + GRACE_SECONDS
            trajectory = await member.call("rollout", job.request, timeout_seconds=limit)
        except (*_LOST, *_ELSEWHERE) as e:
            job.attempts += 1
            job.avoid = member
            self._after_failure(member, e, [job.request], job.attempts)
            if job.attempts >= ATTEMPTS:
                self._settle(job, error=e)
            else:
                self._spawn(self._again(job, pause=isinstance(e, RetrieverUnavailable | WorkerUnavailableError)))
        except asyncio.CancelledError:
            # The worker is leaving, or the caller has gone.
            if not job.future.done() and not self._closed:
                self._spawn(self._again(job, pause=False))
            raise
        except Exception as e:
            self._settle(job, error=e)
        else:
            self._crashes[member.slot] = 0
            tokens = sum(len(a.token_ids) for a in trajectory.actions)
            source = job.request.question.data_source
            self._mean_tokens[source] = 0.95 * self._mean_tokens.get(source, tokens) + 0.05 * tokens
            self._settle(job, trajectory)
        finally:
            member.jobs.pop(job.request.uid, None)
            member.outstanding_tokens = max(0.0, member.outstanding_tokens - expected) if member.jobs else 0.0
            self._dispatch()

    def _settle(self, job: Job, trajectory: Trajectory | None = None, error: BaseException | None = None) -> None:
        if job.future.done():
            return
        if error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(trajectory)

    async def _again(self, job: Job, pause: bool) -> None:
        if pause:
            await asyncio.sleep(min(LAST_BACK_OFF_SECONDS, FIRST_BACK_OFF_SECONDS * 2 ** (job.attempts - 1)))
        self._pending.append(job)
        self._dispatch()

    def _expected_tokens(self, request: TrajectoryRequest) -> float:
        return self._mean_tokens.get(request.question.data_source, self._settings.max_response_tokens)

    def _after_failure(self, member: Member, error: BaseException, requests: list[TrajectoryRequest], attempt: int) -> None:
        for request in requests:
            self._on_event(
                {
                    "event": "trajectory_retry",
                    "uid": request.uid,
                    "worker": member.id,
                    "attempt": attempt,
                    "reason": _reason(error),
                }
            )
        if isinstance(error, _LOST):
            self._lose(member, error)

    def _fail_jobs(self, error: Exception) -> None:
        while self._pending:
            self._settle(self._pending.popleft(), error=error)

    # -- membership ---------------------------------------------------------------------------------------------------------------

    def _spawn(self, work) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _name(self, slot: int) -> str:
        return f"w{slot}.{max(1, self._incarnations[slot])}"

    def _why_none(self) -> str:
        if self._closed:
            return "the rollout pool is closed"
        if self._target == 0:
            return "no rollout worker is left: the pool was scaled to 0"
        reasons = "; ".join(f"slot {s}: {r}" for s, r in sorted(self._given_up.items()))
        return f"no rollout worker is left, and replacements ended one after the other ({reasons})"

    def _lose(self, member: Member, error: BaseException) -> None:
        """A worker is dead, or as good as dead: take it out, and have it replaced."""
        if self._members.get(member.slot) is not member:
            return
        del self._members[member.slot]
        member.kill()
        self._on_event({"event": "worker_lost", "worker": member.id, "pid": member.info.pid, "reason": _reason(error)})
        if member.state != "draining":
            self._crashes[member.slot] += 1
        self._changed.set()

    async def _start_member(self, slot: int) -> None:
        """Start a worker, give it the current weights, and let it join."""
        self._incarnations[slot] += 1
        id = self._name(slot)
        actor = placement.create_actor(id, self._settings, **self._worker_arguments)
        member = Member(slot, id, actor, WorkerInfo(id, 0, "", 0, state="starting"))
        limit = self._settings.start_timeout_seconds
        try:
            member.info = await placement.first_answer(actor, id, self._settings, self._target)
            member.info = await member.call("start", timeout_seconds=limit)
            while self._update is not None and member.version < self._version:
                await self._send_weights(member, self._update)
        except BaseException as e:
            member.kill()
            if isinstance(e, TimeoutError):
                raise NoWorkersError(f"rollout worker {id} was not up within rollout.start_timeout_seconds={limit:g}") from e
            if isinstance(e, ActorDiedError):
                raise NoWorkersError(f"rollout worker {id} died while it started: {_reason(e)}") from e
            raise
        member.state = "ready"
        self._members[slot] = member
        self._on_event(
            {"event": "worker_join", "worker": id, "pid": member.info.pid, "node": member.info.node, "version": member.version}
        )
        self._changed.set()
        self._dispatch()

    async def _watch(self) -> None:
        """Replace what is missing, and ping what is there."""
        pings: dict[Member, asyncio.Task] = {}
        while True:
            for slot in range(self._target):
                if slot not in self._members and slot not in self._starting and slot not in self._given_up:
                    task = asyncio.create_task(self._replace(slot))
                    self._starting[slot] = task
                    task.add_done_callback(lambda t, s=slot: self._starting.pop(s) if self._starting.get(s) is t else None)
            for member in list(self._members.values()):
                if member not in pings or pings[member].done():
                    pings[member] = asyncio.create_task(self._ping(member))
            pings = {m: t for m, t in pings.items() if not t.done() or m in self._members.values()}
            self._dispatch()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _ping(self, member: Member) -> None:
        try:
            member.info = await member.call("info", timeout_seconds=SILENCE_SECONDS)
        except TimeoutError:
            self._lose(member, TimeoutError(f"no answer for {SILENCE_SECONDS:g} s"))
        except _LOST as e:
            self._lose(member, e)

    async def _replace(self, slot: int) -> None:
        crashes = self._crashes[slot]
        if crashes >= CRASHES:
            self._given_up[slot] = f"{crashes} workers ended without having finished a trajectory"
            self._on_event({"event": "crash_loop", "slot": slot, "reason": self._given_up[slot]})
            self._changed.set()
            return
        if crashes:
            await asyncio.sleep(min(LAST_BACK_OFF_SECONDS, FIRST_BACK_OFF_SECONDS * 2 ** (crashes - 1)))
        try:
            await self._start_member(slot)
        except Exception as e:
            self._crashes[slot] += 1
            self._on_event({"event": "worker_start_failed", "worker": self._name(slot), "reason": _reason(e)})


def _reason(error: BaseException) -> str:
    """An error on one line."""
    cause = getattr(error, "cause", None)
    shown = cause if isinstance(cause, BaseException) else error
    text = str(shown).strip().splitlines()
    return f"{type(shown).__name__}: {text[0] if text else ''}"[:400]
