"""Ray's own processes: they may not come up, and may die under a run: the GCS (its head) or the raylet of
the driver's node.

A death is not noticed soon by Ray itself. Actors live on for some seconds after their raylet, and for minutes
after the GCS; then everything exits, with Ray's words. Within that time a run saves what it has.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import psutil
import ray
from ray._private import utils, worker
from ray._private.worker import global_worker

from services.common.errors import EnvironmentLacks
from services.common.processes.alive import is_alive
from services.common.processes.host_limits import lack_of_open_files, lack_of_threads
from services.local_ray import end_what_is_left
from trainer.session import output

LOOK_SECONDS = 1.0
ANSWER_SECONDS = 3.0
LOCAL_GCS_SECONDS, JOINED_GCS_SECONDS = 2.0, 20.0
"""Time without an answer after which the GCS is lost. That of a cluster may be started again by whoever runs
it."""
RECONNECT_SECONDS = 600
"""Longest time that a local Ray lives on without its GCS: a large checkpoint takes minutes to write."""
START_SECONDS = "RAY_raylet_start_wait_time_s"
RAY_SECONDS = 300.0
"""Longest wait for Ray to start or to be joined; twice the time of START_SECONDS where that is longer."""


class RayLost(EnvironmentLacks):
    """Ray has died under the run."""


def leave_without_ray(lost: RayLost, more: str = "") -> NoReturn:
    """Say so, kill the processes of the local Ray, and end this process as it is: every further call to Ray
    would block for minutes."""
    output.drain()
    output.complain(f"unspiral: {lost}{more}")
    end_what_is_left()
    os._exit(lost.exit_code)


def _leave_start(line: str, code: int) -> NoReturn:
    output.drain()
    output.complain(f"unspiral: {line}")
    end_what_is_left()
    os._exit(code)


class StartLimit:
    """Ends a start of Ray that takes too long: some waits inside Ray have no end.

    It sends this process SIGINT, which `signals.cut_short` around it answers; `left` is what that calls
    where Ray does not come back to Python."""

    def __init__(self, address: str | None) -> None:
        self.address = address
        self.seconds = _start_seconds()
        self.reached = threading.Event()

    def late(self) -> EnvironmentLacks:
        return EnvironmentLacks(f"{not_up(self.address)}: not up within {self.seconds:g} s")

    def left(self, number: int) -> NoReturn:
        """Ends this process, and those of Ray."""
        if self.reached.is_set():
            late = self.late()
            _leave_start(str(late), late.exit_code)
        _leave_start(
            f"{signal.Signals(number).name}: Ray did not leave its start; ended with it", 128 + number
        )

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While inside, in the main thread, the time runs."""
        main = threading.get_ident()

        def end() -> None:
            self.reached.set()
            signal.pthread_kill(main, signal.SIGINT)

        timer = threading.Timer(self.seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def not_up(address: str | None) -> str:
    """What a start that failed says first: what to do about it, where something is known."""
    if address:
        return f"RAY_ADDRESS={address}: cannot join that cluster"
    if lack := lack_of_threads() or lack_of_open_files():
        return f"a local Ray did not start ({lack})"
    # Some waits inside Ray are fixed: a longer one does not help whoever has set it already.
    longer = "" if START_SECONDS in os.environ else f", or set {START_SECONDS}=180"
    return f"a local Ray did not start (on a busy machine: try again when it has less to do{longer})"


def _start_seconds() -> float:
    try:
        of_ray = float(os.environ.get(START_SECONDS, "0"))
    except ValueError:  # Ray's own to complain about
        of_ray = 0.0
    return max(RAY_SECONDS, 2 * of_ray)


@contextmanager
def in_a_group_of_their_own() -> Iterator[None]:
    """Processes that Ray starts inside do not get the signals of the driver's process group, as `timeout`
    does: a stop would find no Ray left for its checkpoint. Ray's own function runs in each of them before its
    program does; they still end with this process."""
    bound = utils.set_kill_on_parent_death_linux

    def apart() -> None:
        bound()
        os.setpgrp()

    utils.set_kill_on_parent_death_linux = apart
    try:
        yield
    finally:
        utils.set_kill_on_parent_death_linux = bound


@contextmanager
def ray_watched(on_lost: Callable[[RayLost], None]) -> Iterator[None]:
    """While inside, `on_lost` is called once, from a thread, when Ray has died."""
    if not ray.is_initialized():
        yield
        return
    over = threading.Event()
    gcs = ray.get_runtime_context().gcs_address
    raylet = raylet_process()
    local = not os.environ.get("RAY_ADDRESS")
    thread = threading.Thread(
        target=_watch, args=(over, gcs, raylet, local, on_lost), name="ray-watch", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()


def _watch(
    over: threading.Event,
    gcs: str,
    raylet: psutil.Process | None,
    local: bool,
    on_lost: Callable[[RayLost], None],
) -> None:
    patience = LOCAL_GCS_SECONDS if local else JOINED_GCS_SECONDS
    answered = time.monotonic()
    while not over.is_set():
        died = _dies_within(raylet, LOOK_SECONDS) if raylet is not None else over.wait(LOOK_SECONDS)
        if over.is_set():
            return
        if died:
            assert raylet is not None
            on_lost(RayLost(f"Ray's raylet on this machine (pid {raylet.pid}) has died"))
            return
        if _answers(gcs):
            answered = time.monotonic()
        elif time.monotonic() - answered > patience:
            on_lost(RayLost(f"Ray's head (GCS) at {gcs} has died: no answer for {patience:.0f} s"))
            return


def raylet_process() -> psutil.Process | None:
    """The raylet of this process, or None where it cannot be seen (it runs in another container)."""
    name = global_worker.node.raylet_socket_name
    for process in psutil.process_iter(["name", "cmdline"]):
        command = process.info["cmdline"] or ()
        if process.info["name"] == "raylet" and any(part.endswith(f"={name}") for part in command):
            return process
    return None


def _dies_within(process: psutil.Process, seconds: float) -> bool:
    """Returns at once when the process dies: Ray ends the driver, without a word, at its next use of the
    object store, which has died with the raylet."""
    try:
        handle = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # an old kernel or container has no such handle, nor has a dead process
        time.sleep(seconds)
        return not is_alive(process)
    try:
        look = select.poll()
        look.register(handle, select.POLLIN)
        return bool(look.poll(1000 * seconds))
    finally:
        os.close(handle)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def silence_ray() -> None:
    """Keep Ray's own messages (a process died, with its last 20 lines and escape codes) in its session's
    logs. The run itself says what they mean for it."""
    worker._worker_logs_enabled = False
    log = logging.getLogger("ray")
    log.addHandler(logging.NullHandler())
    log.propagate = False
