"""The run's side of the control plane: what its server is asked becomes work of the driver's own event loop,
or an answer from it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import httpx
import ray

from retriever_service.client import NO_SUCH_ROUTE
from retriever_service.refusals import detail_of
from services.common.counting import counted
from services.common.deadlines import within
from services.common.errors import EnvironmentLacks, UserError
from services.common.files import hints, write_json
from services.common.printing.messages import said_by
from services.common.redaction import address_without_secrets
from services.common.runs.paths import CONTROL
from services.control.gateway import announce_run, withdraw_run
from services.control.launch import serve_in_thread
from services.control.records import (
    PAUSE_INSTEAD,
    Done,
    Reach,
    RunStatus,
    WorkerStatus,
    no_run,
)
from services.likelihood.wire.about import ControlPlace
from trainer.config.schema import Config

if TYPE_CHECKING:
    from trainer.loop.driver import Driver

T = TypeVar("T")
ANSWER_SECONDS = 10.0
"""Longest wait for the driver's loop."""
REACH_SECONDS = 1.0
"""Longest wait for a service to say whether it can serve."""


class RunControl:
    """`services.control.records.Control` of a run. The server's thread calls the methods; what touches the
    driver runs on the loop that made this."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.id = uuid.uuid4().hex
        """A gateway tells this run by it from other servers at its address."""
        self.url: str | None = None
        """Its address; None where it is not served."""
        self.driver: Driver | None = None
        """Set once everything is started."""
        self.ending = False
        self._loop = asyncio.get_running_loop()
        self._began = time.monotonic()
        self._tasks: set[asyncio.Task] = set()

    def announced_url(self) -> str | None:
        """The address by which other machines reach it, where it listens to them; None where it is not
        served."""
        if self.url and self.config.control.host in ("0.0.0.0", "::"):
            return f"http://{ray.util.get_node_ip_address()}:{self.url.rpartition(':')[2]}"
        return self.url

    def place(self) -> ControlPlace | None:
        """What the likelihood store is told, so that its page can pass requests on."""
        url = self.announced_url()
        return ControlPlace(url=url, id=self.id) if url else None

    async def ready(self) -> None:
        await self._on_loop(self._answer())

    async def _answer(self) -> None:
        """That the loop comes round to this is the answer."""

    async def status(self) -> RunStatus:
        status = await self._on_loop(self._status())
        if (driver := self.driver) is not None:
            status.retriever, status.store = await asyncio.gather(
                reach(driver.system.retriever_url), reach(driver.system.store.url)
            )
        return status

    async def scale(self, n: int | Literal["all"], ahead: bool) -> Done:
        return await self._on_loop(self._scale(n, ahead))

    async def drain(self, worker: str) -> Done:
        return await self._on_loop(self._drain(worker))

    async def pause(self) -> Done:
        return await self._on_loop(self._pause())

    async def resume(self) -> Done:
        return await self._on_loop(self._resume())

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise no_run(f"run {self.config.run.name} has ended") from None
        late = (
            f"run {self.config.run.name} did not answer within {ANSWER_SECONDS:g} s: its driver (pid "
            f"{os.getpid()}) is busy"
        )
        async with within(ANSWER_SECONDS, lambda: EnvironmentLacks(late, status=504)):
            return await asyncio.wrap_future(future)

    # On the driver's loop

    def _running(self) -> Driver:
        if self.driver is None or self.ending:
            raise no_run(
                f"run {self.config.run.name} is {'ending' if self.ending else 'starting'}; ask again while "
                "it runs"
            )
        return self.driver

    async def _status(self) -> RunStatus:
        driver = self.driver
        config = self.config
        status = RunStatus(
            state="ending" if self.ending else "starting",
            run=config.run.name,
            folder=str(self.folder.resolve()),
            steps=config.trainer.steps,
            seconds=round(time.monotonic() - self._began, 1),
        )
        if driver is None:
            return status
        pool = driver.system.pool
        if not self.ending:
            status.state = "running" if driver.resumed.is_set() else "paused" if driver.idle else "pausing"
        status.attempt = driver.attempt
        status.step = driver.step
        status.version = driver.version
        status.stage = driver.progress.doing
        status.phase = driver.monitor.phase
        status.restores = driver.restores
        status.target = pool.target
        status.follows_cluster = pool.follows_cluster
        status.problem = pool.problem
        status.tokens_per_s = round(pool.tokens_per_s(), 1)
        status.last_sync_seconds = driver.sync_seconds
        status.rewards = list(driver.rewards)
        status.workers = [
            WorkerStatus(
                id=w.id,
                node=w.node,
                pid=w.pid,
                state=w.state,
                version=w.policy_version,
                outstanding_tokens=w.outstanding_tokens,
                trajectories=w.trajectories,
            )
            for w in pool.workers()
        ]
        return status

    async def _scale(self, n: int | Literal["all"], ahead: bool) -> Done:
        driver = self._running()
        pool = driver.system.pool
        if self.config.rollout.deterministic:
            raise UserError(
                "rollout.deterministic=true: each trajectory has its worker, so their number stays as it is"
            )
        if (
            n != "all"
            and n > pool.target
            and not ahead
            and (lacking := pool.lacking(n, driver.system.learner.held))
        ):
            raise EnvironmentLacks(lacking, status=409)
        before = pool.target
        self._background(pool.scale(n))
        await asyncio.sleep(0)  # it takes the number now, and waits for leavers later
        driver.system.folder.event("control_scale", asked=n, target=pool.target, before=before)
        text = f"{counted(pool.target, 'worker')} wanted" + (
            " (all that the cluster has room for)" if n == "all" else ""
        )
        return Done(text=f"{text}, before {before}", target=pool.target)

    async def _drain(self, worker: str) -> Done:
        driver = self._running()
        pool = driver.system.pool
        if worker not in (ids := [w.id for w in pool.workers() if w.state not in ("starting", "waiting")]):
            raise UserError(
                f"no worker {worker} that could be drained; there are {', '.join(ids) or 'none'}", status=404
            )
        if self.config.rollout.deterministic:
            raise UserError(
                "rollout.deterministic=true: each trajectory has its worker, so none can be drained"
            )
        others = [w for w in pool.workers() if w.id != worker and w.state not in ("draining", "failed")]
        if pool.target <= 1 or not others:
            raise UserError(f"{worker} is the last worker, and {PAUSE_INSTEAD}")
        self._background(pool.drain(worker))
        driver.system.folder.event("control_drain", worker=worker, target=pool.target)
        return Done(text=f"{worker} drains; {counted(pool.target, 'worker')} wanted", target=pool.target)

    async def _pause(self) -> Done:
        driver = self._running()
        if driver.resumed.is_set():
            driver.resumed.clear()
            driver.system.folder.event("pause", step=driver.step)
            driver.progress.say(
                f"pausing after step {driver.step + (not driver.idle)}, as the control plane asks"
            )
        runs = "" if driver.idle else f"; step {driver.step + 1} still runs"
        return Done(
            text=f"run {self.config.run.name} begins no further step; last finished: {driver.step}{runs}"
        )

    async def _resume(self) -> Done:
        driver = self._running()
        if not driver.resumed.is_set():
            driver.resumed.set()
            driver.system.folder.event("pause_over", step=driver.step)
            driver.progress.say("going on, as the control plane asks")
        return Done(text=f"run {self.config.run.name} goes on after step {driver.step}")

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop_tasks(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def reach(url: str) -> Reach:
    """Whether a service can serve: a likelihood service whose Redis is away is up, and takes no record. Its
    address is shown without user and password."""
    shown = address_without_secrets(url)
    try:
        async with httpx.AsyncClient(timeout=REACH_SECONDS, trust_env=False) as http:
            answer = await http.get(url.rstrip("/") + "/readyz")
    except httpx.TimeoutException:
        return Reach(url=shown, reachable=False, problem=f"no answer within {REACH_SECONDS:g} s")
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        return Reach(url=shown, reachable=False, problem=said_by(e))
    if answer.is_success or answer.status_code in NO_SUCH_ROUTE:
        return Reach(url=shown, reachable=True)
    return Reach(url=shown, reachable=False, problem=detail_of(answer))


@asynccontextmanager
async def served(config: Config, folder: Path, say: Callable[[str], None]) -> AsyncIterator[RunControl]:
    """The run's control plane, served while inside; its address is in `control.json` of the run's folder."""
    control = RunControl(config, folder)
    address = folder / CONTROL
    address.unlink(missing_ok=True)  # of an attempt that was killed
    if not config.control.enabled:
        yield control
        return
    server = await asyncio.to_thread(serve_in_thread, control, config.control, say, control.id)
    control.url = server.url
    about = {"run": config.run.name, "url": server.url, "pid": os.getpid(), "host": socket.gethostname()}
    try:
        write_json(address, about)
        yield control
    finally:
        control.ending = True
        await control.stop_tasks()
        try:
            if hints(address) == about:  # a run that has taken the folder's name has its own there
                address.unlink(missing_ok=True)
        except OSError as error:  # and must not hide why the run ended
            say(f"warning: {address} stays: {error.strerror}")
        await asyncio.to_thread(server.stop)


@contextlib.contextmanager
def announced(control: RunControl, driver: Driver) -> Iterator[None]:
    """The run is known to gateways of its cluster while inside, and its driver answers."""
    run = control.config.run.name
    control.driver = driver
    if (url := control.announced_url()) is None:
        yield
        return
    announce_run(run, control.id, url, str(control.folder.resolve()))
    try:
        yield
    finally:
        control.ending = True
        withdraw_run(run, control.id)
