"""The last line against a deadlock: every wait has a timeout of its own, and this sees to it that none was
forgotten.

Without progress (a trajectory finished, a call of learner or reward returned, another stage or step) for
`trainer.stall_timeout_seconds`, what every part waits for is printed and written to `stall.txt`, and the run
ends with exit status 1. A call of the learner has until its own timeout.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from services.common.counting import counted
from services.common.errors import UnspiralError
from services.common.files import write_atomically
from services.common.processes.stacks import task_stacks, thread_stacks
from trainer.session.output import complain

if TYPE_CHECKING:
    from trainer.loop.driver import Driver

LOOKS = 20
"""Number of looks per `stall_timeout_seconds`."""
STACK_SECONDS = 10.0
"""Longest wait for the actors' stacks."""
LEAVE_SECONDS = 60.0
"""Longest wait for a clean end, before the process ends as it is."""
SLACK_SECONDS = 60.0
"""Time that the learner gets beyond its own timeout."""


class Watchdog:
    """Watches a driver from a thread of its own, since the driver's loop itself may be stuck."""

    def __init__(self, driver: Driver, loop: asyncio.AbstractEventLoop):
        self.driver = driver
        self.loop = loop
        self.limit = driver.config.trainer.stall_timeout_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()

    def _mark(self) -> tuple[Any, ...]:
        d = self.driver
        done = d.system.pool.trajectories, d.on_learner.returned, d.sampler.calls.returned
        return *done, d.progress.doing, d.step, d.attempt

    def _watch(self) -> None:
        mark = self._mark()
        since = time.monotonic()
        told = False
        while not self._over.wait(self.limit / LOOKS):
            now = self._mark()
            if now != mark or self.driver.idle:
                mark = now
                since = time.monotonic()
                told = False
                continue
            quiet = time.monotonic() - since
            if quiet > self.limit and not told:
                told = True
                self._tell(quiet)
            call = self.driver.on_learner.doing
            own = self.driver.config.learner.step_timeout_seconds
            if quiet > (max(self.limit, own + SLACK_SECONDS) if call else self.limit):
                self._end(quiet)
                return

    def _tell(self, quiet: float) -> None:
        """Report what each part waits for. A part that cannot be asked, a full disk, or a folder that is
        gone, does not keep the run from being ended."""
        folder = self.driver.system.folder
        try:
            text = self.report(quiet)
        except Exception as e:  # of the part that is stuck, whichever it is
            text = (
                f"no progress for {quiet:.0f} s: {self.driver.progress.doing}; no more can be said "
                f"({type(e).__name__}: {e})"
            )
        self.driver.progress.say(text)
        try:
            folder.hold()  # another run may have its name by now
            write_atomically(folder.path / "stall.txt", text + "\n")
            folder.event(
                "stalled",
                step=self.driver.step,
                stage=self.driver.progress.doing,
                seconds=round(quiet, 1),
                report="stall.txt",
            )
        except (OSError, UnspiralError) as e:
            self.driver.progress.say(f"{folder.path / 'stall.txt'} cannot be written: {e}")

    def _end(self, quiet: float) -> None:
        error = UnspiralError(
            f"no progress for {quiet:.0f} s (trainer.stall_timeout_seconds={self.limit:g}) in "
            f"{self.driver.progress.doing}; what each part "
            f"waits for is in {self.driver.system.folder.path / 'stall.txt'}",
            explained=True,
        )
        self.loop.call_soon_threadsafe(self.driver.stop.abort, error)
        if not self._over.wait(LEAVE_SECONDS):
            try:
                complain(f"unspiral: {error}; and no clean end within {LEAVE_SECONDS:g} s")
                self.driver.system.folder.summary(self.driver.summary() | {"exit": 1})
            except Exception as e:  # a full disk, or what is stuck: the process ends all the same
                complain(f"unspiral: no summary was written: {e}")
            finally:
                os._exit(1)

    def report(self, quiet: float) -> str:
        """What each part waits for."""
        d = self.driver
        lines = [
            f"no progress for {quiet:.0f} s: {d.progress.doing}, "
            f"{counted(d.system.pool.trajectories, 'trajectory', 'trajectories')} finished so far"
        ]
        for w in d.system.pool.workers():
            lines.append(
                f"worker {w.id} (pid {w.pid} on {w.node}): {w.state}, version {w.policy_version} of "
                f"{d.version}, {w.outstanding_tokens} tokens outstanding"
            )
        if d.system.pool.problem:
            lines.append(d.system.pool.problem)
        lines.append(
            f"learner: {f'in {doing}' if (doing := d.on_learner.doing) else 'no call is being made'}"
        )
        if reward := d.sampler.calls.waits_for():
            lines.append(f"reward: {reward}")
        lines += ["", "== driver: tasks", task_stacks(asyncio.all_tasks(self.loop)), "", "== driver: threads"]
        names = {t.ident: t.name for t in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            lines += [
                f"thread {names.get(ident, ident)}:",
                "".join(traceback.format_stack(frame)[-8:]).rstrip(),
            ]
        for name, text in self._actors():
            lines += ["", f"== {name}", text]
        return "\n".join(lines)

    def _actors(self) -> list[tuple[str, str]]:
        """Name and stacks of each worker and learner rank, asked of the node that it runs on."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        asked: list[tuple[str, Any]] = []
        nodes = (
            {n["NodeManagerHostname"]: n["NodeID"] for n in ray.nodes() if n["Alive"]}
            if ray.is_initialized()
            else {}
        )
        places = [(f"worker {w.id}", w.node, w.pid) for w in self.driver.system.pool.workers()]
        places += [
            (f"learner rank {i}", w.host, w.pid) for i, w in enumerate(self.driver.system.learner.where)
        ]
        for name, host, pid in places:
            if host in nodes:
                place = NodeAffinitySchedulingStrategy(nodes[host], soft=False)
                task = ray.remote(num_cpus=0, max_retries=0)(thread_stacks).options(scheduling_strategy=place)
                asked.append((f"{name} (pid {pid} on {host}): threads", task.remote(pid)))
        for id, ref in self.driver.system.pool.waits():
            asked.append((f"worker {id}: tasks", ref))
        if not asked:
            return []
        done, _ = ray.wait([ref for _, ref in asked], num_returns=len(asked), timeout=STACK_SECONDS)
        out = []
        for name, ref in asked:
            try:
                text = ray.get(ref) if ref in done else f"no answer within {STACK_SECONDS:g} s"
            except ray.exceptions.RayError as e:
                text = f"no answer: {type(e).__name__}"
            out.append((name, text))
        return out


@contextmanager
def watched(driver: Driver) -> Iterator[None]:
    """A watchdog on the driver while inside."""
    dog = Watchdog(driver, asyncio.get_running_loop())
    dog.start()
    try:
        yield
    finally:
        dog.stop()
