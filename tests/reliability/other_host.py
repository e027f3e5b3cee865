"""A second host on this machine: a network namespace at the other end of a cable. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


def ip(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)


@dataclass(frozen=True)
class OtherHost:
    """name: of the namespace. link: of both ends of the cable. here, there: addresses of this host and of the
    other."""

    name: str
    link: str
    here: str
    there: str

    def run(self, *command: str, seconds: float = 60, environment=None) -> subprocess.CompletedProcess:
        """A command on the other host."""
        return subprocess.run(
            ["ip", "netns", "exec", self.name, *map(str, command)],
            capture_output=True,
            text=True,
            timeout=seconds,
            env=environment,
        )


@contextlib.contextmanager
def other_host(name: str, network: str) -> Iterator[OtherHost]:
    """network: the first three numbers of the cable's addresses. Skips the test where a namespace cannot be
    made, with the reason."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and ip (iproute2), to make a network namespace")
    host = OtherHost(name, f"{name[:12]}0", f"{network}.1", f"{network}.2")
    ip("link", "del", host.link)  # of a test that was killed
    ip("netns", "del", name)
    made = ip("netns", "add", name)
    if made.returncode:
        pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
    try:
        ip("link", "add", host.link, "type", "veth", "peer", "name", host.link, "netns", name)
        ip("addr", "add", f"{host.here}/24", "dev", host.link)
        ip("link", "set", host.link, "up")
        for words in (
            ("addr", "add", f"{host.there}/24", "dev", host.link),
            ("link", "set", host.link, "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", name, *words)
        yield host
    finally:
        ip("link", "del", host.link)
        ip("netns", "del", name)
