"""Joining a cluster or starting a local Ray, which may take minutes or never come to an end; leaving it."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import ray
from ray._private import utils, worker

from services.common.errors import EnvironmentLacks
from services.common.loading.own_packages import refuse_others_here
from services.common.processes import signals
from services.common.processes.host_limits import lack_of_open_files, lack_of_threads
from services.common.processes.semaphores import remove_dead_semaphores
from services.local_ray import start_local_ray, stop_local_ray
from trainer.session.on_ray.watch import leave
from trainer.session.waits import busy, told

RECONNECT_SECONDS = 600
"""Longest time that a local Ray lives on without its GCS: a large checkpoint takes minutes to write."""
START_SECONDS = "RAY_raylet_start_wait_time_s"
RAY_SECONDS = 300.0
"""Longest wait for Ray to start or to be joined; twice the time of START_SECONDS where that is longer."""


def connect_ray(say: Callable[[str], None]) -> None:
    """Join the cluster of RAY_ADDRESS (set inside `ray job submit`), otherwise start a local Ray, which ends
    with this process and answers nobody else. `leave_ray` undoes it.

    Raises EnvironmentLacks, also where Ray is not up within RAY_SECONDS, and Stopped after a signal: Ray's
    start blocks the event loop, for minutes on a busy machine."""
    refuse_others_here()
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        for lack in filter(None, (lack_of_threads(), lack_of_open_files())):
            say(f"warning: {lack}")
    say(f"joining Ray at {address}" if address else "starting a local Ray")
    limit = StartLimit(address)
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    # Read by a Ray that starts here: without its head it lives on, for the run to save what it has.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(RECONNECT_SECONDS))
    try:
        # Ray puts its own handlers in place of ours, which would end the process within a clean stop.
        with (
            signals.cut_short(limit.left),
            signals.kept(),
            limit.kept(),
            _in_a_group_of_their_own(),
            told(say, lambda: f"Ray to start{busy()}"),
        ):
            if address:
                # A job may bring some of these variables itself (--runtime-env), and Ray refuses the same
                # name twice unless told which one holds.
                os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
                ray.init(address=address, runtime_env={"env_vars": worker_environment()}, **options)
            else:
                start_local_ray(include_dashboard=False, **options)
    except signals.Stopped:
        leave_ray()
        if limit.reached.is_set():
            raise limit.late() from None
        raise
    except Exception as e:  # a raylet that is not up in time is a bare one
        reason = " ".join(str(e).split())[:300]
        raise EnvironmentLacks(f"{_not_up(address)}: {reason}") from e
    else:
        _silence_ray()


def leave_ray() -> None:
    """Leave the cluster, or end the local Ray, and clear away what its engines left."""
    stop_local_ray()
    remove_dead_semaphores()


def worker_environment() -> dict[str, str]:
    """The only variables that travel to actors by Ray's runtime environment: an allow-list, since these are
    shown on the dashboard."""
    allowed = (
        "HF_HUB_OFFLINE",
        "UNSPIRAL_CACHE",
        "TORCH_EXTENSIONS_DIR",
        "NCCL_NVLS_ENABLE",
        "NCCL_CUMEM_ENABLE",
        "RAY_AUTH_MODE",
    )
    return {k: os.environ[k] for k in allowed if k in os.environ}


class StartLimit:
    """Ends a start of Ray that takes too long: some waits inside Ray have no end.

    It sends this process SIGINT, which `signals.cut_short` around it answers; `left` is what that calls
    where Ray does not come back to Python."""

    def __init__(self, address: str | None) -> None:
        self.address = address
        self.seconds = _start_seconds()
        self.reached = threading.Event()

    def late(self) -> EnvironmentLacks:
        return EnvironmentLacks(f"{_not_up(self.address)}: not up within {self.seconds:g} s")

    def left(self, number: int) -> NoReturn:
        """Ends this process, and those of Ray."""
        if self.reached.is_set():
            late = self.late()
            leave(str(late), late.exit_code)
        leave(f"{signal.Signals(number).name}: Ray did not leave its start; ended with it", 128 + number)

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


def _not_up(address: str | None) -> str:
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
def _in_a_group_of_their_own() -> Iterator[None]:
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


def _silence_ray() -> None:
    """Keep Ray's own messages (a process died, with its last 20 lines and escape codes) in its session's
    logs. The run itself says what they mean for it."""
    worker._worker_logs_enabled = False
    log = logging.getLogger("ray")
    log.addHandler(logging.NullHandler())
    log.propagate = False
