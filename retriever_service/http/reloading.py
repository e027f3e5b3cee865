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
from retriever_service.index_folder.description import stamp_of
from services.common.processes import signals

log = logging.getLogger("retriever_service")


@asynccontextmanager
async def reloading(service: Service) -> AsyncIterator[None]:
    """Inside, the service opens its index anew when it should. Signals are heard in a main thread alone."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    place = _Place(service)

    def begin(number: int) -> None:
        task = loop.create_task(place.reload())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    if service.settings.reload_seconds:
        tasks.add(loop.create_task(place.watch()))
    main = threading.current_thread() is threading.main_thread()
    with signals.listening_in_loop(begin, (signal.SIGUSR1,), each=True) if main else nullcontext():
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


class _Place:
    """The place of an index, and which one was opened there last."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._path = Path(service.settings.index)
        self._seen = stamp_of(self._path)

    async def reload(self) -> None:
        """Open the index anew. A failure is a line in the log, and `Service.reload_failure`."""
        service = self._service
        place = service.settings.index
        while service.index is None and service.failure is None:
            await asyncio.sleep(0.05)  # it may have read the old one already
        now = stamp_of(self._path)
        try:
            index = await service.reload()
        except Exception as error:  # of any backend, a user's own among them: the old one goes on
            log.error("the index %s is not opened anew, the one before stays: %s", place, error)
            return
        self._seen = now
        log.warning("the index %s is opened anew: %s passages", place, f"{index.info.passages:,}")

    async def watch(self) -> None:
        """Open it anew where it is another one. After a failure it is tried again each time: files may come
        in after the description that names them."""
        while True:
            await asyncio.sleep(self._service.settings.reload_seconds)
            if self._service.index is None:
                continue
            now = stamp_of(self._path)
            if now is None:  # for a moment, while one takes the place of another
                continue
            if now != self._seen or self._service.reload_failure is not None:
                await self.reload()
