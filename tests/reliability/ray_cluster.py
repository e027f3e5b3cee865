"""A Ray cluster that lives on when a driver dies: `ray start` processes on this machine, ended by their
process ids."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from end_to_end import ENVIRONMENT

RAY = Path(sys.executable).parent / "ray"
START_SECONDS = 60
AUTHENTICATION = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32),
}
"""The token of this process, so that it can join the cluster too."""


class RayNode:
    """One `ray start --block` and what it has started."""

    def __init__(self, *options: str, temp: Path, resources: dict[str, float], host: str | None = None):
        """host: name of a network namespace that is the node's own."""
        self.process = subprocess.Popen(
            [
                *(("ip", "netns", "exec", host) if host else ()),
                RAY,
                "start",
                "--block",
                "--num-cpus=2",
                "--num-gpus=0",
                "--disable-usage-stats",
                *options,
                f"--resources={json.dumps(resources)}",
            ],
            env=ENVIRONMENT | AUTHENTICATION | {"RAY_TMPDIR": str(temp)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def processes(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def end(self) -> None:
        """As a node that is switched off."""
        there = self.processes()
        self.process.kill()
        self.process.wait(60)
        for process in there:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(there, timeout=60)


class RayCluster:
    """A head with the given resources, and nodes that join it. `environment` has drivers use it, and holds
    the token that they need."""

    def __init__(self, at: str = "127.0.0.1", **resources: float):
        with socket.socket() as s:
            s.bind((at, 0))
            self.address = f"{at}:{s.getsockname()[1]}"
        self.temp = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # Ray's sockets lie there: a short path
        self.environment = {"RAY_ADDRESS": self.address} | AUTHENTICATION
        port = self.address.rpartition(":")[2]
        options = (
            "--head",
            f"--node-ip-address={at}",
            f"--port={port}",
            f"--temp-dir={self.temp}",
            "--include-dashboard=false",
        )
        self.nodes = [RayNode(*options, temp=self.temp, resources=resources)]
        self.wait()

    def join(self, at: str = "127.0.0.1", host: str | None = None, **resources: float) -> RayNode:
        """One more node, at an address of this machine or of a network namespace."""
        options = (f"--address={self.address}", f"--node-ip-address={at}")
        self.nodes.append(RayNode(*options, temp=self.temp, resources=resources, host=host))
        return self.nodes[-1]

    def wait(self) -> None:
        place, deadline = self.address.split(":"), time.monotonic() + START_SECONDS
        while not list(self.temp.glob("session_latest/sockets/raylet*")):
            assert self.nodes[0].process.poll() is None and time.monotonic() < deadline, "Ray did not start"
            time.sleep(0.1)
        socket.create_connection((place[0], int(place[1])), 5).close()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        for node in reversed(self.nodes):
            node.end()
        shutil.rmtree(self.temp, ignore_errors=True)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not collected does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
