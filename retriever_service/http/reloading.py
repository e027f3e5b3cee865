"""Serving another index without a stop: on SIGUSR1, or when the place of the index holds another one."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

from retriever_service.http.service import Service
from retriever_service.index_folder.description import META_FILE
from services.common.processes import signals

log = logging.getLogger("retriever_service")
_Stamp = tuple[int, int, int]


@asynccontextmanager
async def reloading(service: Service) -> AsyncIterator[None]:
    """Inside, the service opens its index anew when it should. Signals are heard in a main thread alone."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def begin(number: int) -> None:
        task = loop.create_task(_reload(service))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    if service.settings.reload_seconds:
        tasks.add(loop.create_task(_watch(service)))
    main = threading.current_thread() is threading.main_thread()
    with signals.listening_in_loop(begin, (signal.SIGUSR1,), each=True) if main else nullcontext():
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def _reload(service: Service) -> None:
    place = service.settings.index
    while service.index is None and service.failure is None:
        await asyncio.sleep(0.05)  # it may have read the old one already
    try:
        index = await service.reload()
    except Exception as error:  # of any backend, a user's own among them: the server goes on with what it has
        log.error("the index %s is not opened anew, the one before stays: %s", place, error)
        return
    log.warning("the index %s is opened anew: %s passages", place, f"{index.info.passages:,}")


async def _watch(service: Service) -> None:
    place = Path(service.settings.index)
    seen = _stamp(place)
    while True:
        await asyncio.sleep(service.settings.reload_seconds)
        if service.index is None:
            continue
        now = _stamp(place)
        if now is None or now == seen:  # None: for a moment, while one takes the place of another
            continue
        seen = now
        await _reload(service)


def _stamp(place: Path) -> _Stamp | None:
    """What changes with the file that describes an index; None where there is none now."""
    try:
        found = (place / META_FILE if place.is_dir() else place).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
