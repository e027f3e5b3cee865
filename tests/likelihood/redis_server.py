"""A real redis-server on a free port, with its data in a folder of the test."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
from ports import kept_port

REDIS = shutil.which("redis-server")


class RedisServer:
    """Appends to disk, so that a kill loses nothing that was answered."""

    def __init__(self, folder: Path):
        if REDIS is None:
            pytest.skip("redis-server is not installed")
        self.port = kept_port()
        self.folder, self.process = folder, None
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = [
            REDIS,
            "--port",
            str(self.port),
            "--dir",
            str(self.folder),
            "--appendonly",
            "yes",
            "--save",
            "",
            "--bind",
            "127.0.0.1",
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise TimeoutError(f"redis-server on port {self.port} did not answer within 10 s")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()
