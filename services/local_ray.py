"""A Ray of this process alone, which nobody else can reach.

Left to itself, Ray 2.60 opens a dozen ports on all interfaces, and runs the code of whoever connects. Here
its node has the address 127.0.0.1, so that all of them are on the loopback interface, and they ask for a
token that was made for this run: random, in the environment of this process and of those that it starts, and
nowhere else. (Ray's exporters of metrics ask for none.) Its files lie in a folder of this user's own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import ray
from ray._private import services as ray_services
from ray._raylet import (  # type: ignore[attr-defined]  # compiled, and without stubs
    AuthenticationMode,
    AuthenticationTokenLoader,
    Config,
    get_authentication_mode,
)

from services.common.private_folder import private_folder
from services.common.processes.alive import started

ADDRESS = "127.0.0.1"
OWNER_VARIABLE = "UNSPIRAL_LOCAL_RAY"
"""In the environment of all that a local Ray runs: process id and start time of the process that it belongs
to."""
END_SECONDS = 2.0
"""Longest wait for what a Ray that was ended has left, before it is killed."""
MAX_FOLDER_CHARACTERS = 40
"""Linux takes 107 for a socket's path, of which Ray needs 64 below its folder."""
SHORT = "/tmp"
"""Where the folder lies if the temporary folder has a longer name."""
_PACKAGE = os.path.join(os.path.dirname(ray.__file__), "")
"""What stands in the command line of each of Ray's processes that has no `ray::` name yet."""
_WAS_SET: dict[str, str | None] = {}


def start_local_ray(**options: Any) -> Any:
    """`ray.init` of a new local Ray. RAY_AUTH_TOKEN, where the environment has one, is its token, so that
    holders of it on this machine can join. Until `stop_local_ray`, the environment of this process holds the
    token. Raises what `ray.init` raises."""
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32),
        OWNER_VARIABLE: owner_mark(psutil.Process()),
    }
    if sys.platform == "linux":  # process groups of learner ranks and workers, which know no token
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME") or "lo"
    _WAS_SET.update({name: os.environ.get(name) for name in environment if name not in _WAS_SET})
    os.environ.update(environment)
    with contextlib.ExitStack() as undo:
        undo.callback(stop_local_ray)
        _read_environment_again()
        if get_authentication_mode() != AuthenticationMode.TOKEN:
            raise RuntimeError("this version of Ray does not take RAY_AUTH_MODE=token after its import")
        with _loopback_kept():
            started = ray.init(address="local", _node_ip_address=ADDRESS, **_own_folder(), **options)
        undo.pop_all()
    return started


def stop_local_ray() -> None:
    """End it, and put the environment back. Does nothing where none was started.

    Of a Ray that was cut off in its start, the raylet's agents do not know yet that they end with it, and
    would go on for up to a minute."""
    ray.shutdown()
    if OWNER_VARIABLE in _WAS_SET:
        _end(_of_ray())
    for name, value in _WAS_SET.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _WAS_SET.clear()
    _read_environment_again()


@contextmanager
def local_ray(**options: Any) -> Iterator[Any]:
    """A local Ray while inside; gives what `ray.init` gives."""
    try:
        yield start_local_ray(**options)
    finally:
        stop_local_ray()


def end_what_is_left() -> None:
    """Kill the processes of this process's local Ray, for the case that Ray itself has died: without their
    head they would go on for minutes."""
    if OWNER_VARIABLE not in _WAS_SET:  # none was started here
        return
    for process in [*psutil.Process().children(recursive=True), *_of_ray()]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _of_ray() -> list[psutil.Process]:
    """Ray's own processes of this process's local Ray, those included whose parent has died."""
    mark = os.environ.get(OWNER_VARIABLE)
    found: list[psutil.Process] = []
    if mark is None:
        return found
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
            if process.pid != os.getpid() and process.environ().get(OWNER_VARIABLE) == mark:
                command = process.cmdline()
                if any(_PACKAGE in part or part.startswith("ray::") for part in command):
                    found.append(process)
    return found


def _end(processes: list[psutil.Process]) -> None:
    """Ask them to end, and kill those that do not. psutil makes sure that they are still the same ones."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(processes, timeout=END_SECONDS)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def owner_mark(process: psutil.Process) -> str:
    """A process by its id and start time, since ids are used again."""
    return f"{process.pid}:{started(process):.2f}"


def _read_environment_again() -> None:
    """Ray reads mode and token once, when it is imported and when it first needs them."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _own_folder() -> dict[str, str]:
    """Option for the folder of Ray's logs and sockets. Ray's own choice, /tmp/ray, is a folder in which every
    user of the machine may write."""
    if os.environ.get("RAY_TMPDIR"):
        return {}
    folder = private_folder() / "ray"
    if len(str(folder)) > MAX_FOLDER_CHARACTERS:
        # A long TMPDIR, as batch systems give one to each job. Ray would take it all the same, and not start.
        folder = private_folder(SHORT) / "ray"
    return {"_temp_dir": str(folder)}


@contextmanager
def _loopback_kept() -> Iterator[None]:
    """Ray would take the machine's own address for 127.0.0.1, so that other nodes could join."""
    resolve = ray_services.resolve_ip_for_localhost
    ray_services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        ray_services.resolve_ip_for_localhost = resolve
