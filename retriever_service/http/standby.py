"""What answers while none of several workers has loaded the index: health, and a 503 that says what loads.

A worker accepts requests only once it has loaded, because another one might answer them. As long as none has,
the process above them accepts in their place. Both know of each other by files in one folder: `PID.ready` and
`PID.loading` (a line) of each worker, and `standby` while the parent accepts. A worker that is ready waits
for the end of that, so no request meets the parent when a worker could answer it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from fastapi import FastAPI

from retriever_service.http.server import create_app
from retriever_service.search.search_index import SearchIndex
from retriever_service.settings import ServerSettings
from services.common.files import write_atomically
from services.common.http.serving import Manner, run_in_thread, url_of

log = logging.getLogger("retriever_service")
_STANDBY = "standby"
_LOOK_SECONDS = 0.02
_HAND_OVER_SECONDS = 30.0
"""Longest wait of a worker for the parent to accept no more."""
_START_SECONDS = 60.0


class Crew:
    """Which workers are ready, as files in a folder that all processes know."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def tell(self, line: str) -> None:
        """By a worker: what it waits for."""
        with contextlib.suppress(OSError):  # the folder goes when the service stops
            write_atomically(self.folder / f"{os.getpid()}.loading", line)

    async def take_over(self) -> None:
        """By a worker that has loaded: returns when it may accept requests."""
        (self.folder / f"{os.getpid()}.ready").touch()
        until = time.monotonic() + _HAND_OVER_SECONDS
        while (self.folder / _STANDBY).exists() and time.monotonic() < until:
            await asyncio.sleep(_LOOK_SECONDS)

    def forget(self, pid: int) -> None:
        """By the parent: that worker is no more."""
        for kind in ("ready", "loading"):
            (self.folder / f"{pid}.{kind}").unlink(missing_ok=True)

    def any_ready(self) -> bool:
        """Whether some worker has loaded the index."""
        return any(self.folder.glob("*.ready"))

    def waits(self) -> str:
        """What the workers wait for, in one line."""
        lines = set()
        for path in self.folder.glob("*.loading"):
            with contextlib.suppress(OSError):  # its worker may be gone
                lines.add(path.read_text())
        return "; ".join(sorted(lines - {""}))

    def stand_by(self, on: bool) -> None:
        """By the parent: it accepts requests, or no more."""
        if on:
            (self.folder / _STANDBY).touch()
        else:
            (self.folder / _STANDBY).unlink(missing_ok=True)


class Standby:
    """The parent's part. A context manager; `on_ready` is told the address when the first worker takes
    over."""

    def __init__(
        self,
        settings: ServerSettings,
        sock: socket.socket,
        crew: Crew,
        what: str,
        manner: Manner,
        on_ready: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._sock = sock
        self._crew = crew
        self._what = what
        self._manner = manner
        self._on_ready: Callable[[str], None] | None = on_ready
        self._ended = threading.Event()
        self._lock = threading.Lock()
        """Held while the thread looks whether it may end, and while another one begins."""
        self._at_work = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Standby:
        with self._lock:
            self._begin()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()
        if self._thread is not None:
            self._thread.join(2 * self._manner.drain_seconds + 10)

    def end(self) -> None:
        """Accept no more, now and later: the service stops."""
        self._ended.set()

    def gone(self, pid: int) -> None:
        """A worker is no more; where it was the last one that could answer, the parent stands by again."""
        self._crew.forget(pid)
        with self._lock:
            if not self._at_work and not self._crew.any_ready():
                self._begin()

    def _begin(self) -> None:
        if self._ended.is_set():
            return
        self._at_work = True
        self._thread = threading.Thread(target=self._stand_by, name="standby", daemon=True)
        self._thread.start()

    def _stand_by(self) -> None:
        while self._needed():  # once more where a worker that was ready is gone again
            self._serve()
        with self._lock:
            on_ready = self._on_ready
            self._on_ready = None
        if on_ready is not None and not self._ended.is_set():
            on_ready(url_of(self._settings.host, self._sock))

    def _needed(self) -> bool:
        """Whether no worker is ready; `standby` stays where it is so.

        The file is written before the look. A worker says that it is ready before it looks for the file, so
        one of the two always sees the other.
        """
        self._crew.stand_by(True)
        with self._lock:
            if not self._ended.is_set() and not self._crew.any_ready():
                return True
            self._crew.stand_by(False)
            self._at_work = False
            return False

    def _serve(self) -> None:
        """Serve until a worker is ready, or the service stops."""
        try:
            # Its own handle: what the end of this server closes, the workers still listen on.
            own = self._sock.dup()
            own.setblocking(False)
            host = self._settings.host

            def assembled(parts: ExitStack) -> tuple[FastAPI, socket.socket]:
                return self._app(), parts.enter_context(closing(own))

            with run_in_thread(assembled, host, "retriever", _START_SECONDS, self._manner):
                self._wait()
        except Exception as error:  # whatever it is, the workers do without
            log.error("health is not answered while the workers load: %s", error)
            self._crew.stand_by(False)
            self._wait()

    def _wait(self) -> None:
        while not (self._ended.wait(_LOOK_SECONDS) or self._crew.any_ready()):
            pass

    def _app(self) -> FastAPI:
        """The application without its lifespan, which would open the index."""
        app = create_app(self._settings, _never)
        app.state.service.what = self._what
        app.state.service.waits = self._crew.waits
        return app


def _never() -> SearchIndex:
    raise AssertionError("the process above the workers opens no index")
