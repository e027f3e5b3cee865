"""Ray's own processes may die under a run: the GCS (its head) or the raylet of the driver's node.

Neither is noticed soon by Ray itself. Actors live on for some seconds after their raylet, and for minutes
after the GCS; then everything exits, with Ray's words. Within that time a run saves what it has.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import psutil
import ray
from ray._private.worker import global_worker

from services.common.errors import EnvironmentLacks
from services.common.processes.alive import is_alive
from services.local_ray import end_what_is_left
from trainer.session import output

LOOK_SECONDS = 1.0
ANSWER_SECONDS = 3.0
LOCAL_GCS_SECONDS, JOINED_GCS_SECONDS = 2.0, 20.0
"""Time without an answer after which the GCS is lost. That of a cluster may be started again by whoever runs
it."""


class RayLost(EnvironmentLacks):
    """Ray has died under the run."""


def leave_without_ray(lost: RayLost, more: str = "") -> NoReturn:
    """Say so, kill the processes of the local Ray, and end this process as it is: every further call to Ray
    would block for minutes."""
    leave(f"{lost}{more}", lost.exit_code)


def leave(line: str, code: int) -> NoReturn:
    """End this process, after a last line on standard error, and the processes of its local Ray."""
    output.drain()
    output.complain(f"unspiral: {line}")
    end_what_is_left()
    os._exit(code)


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
