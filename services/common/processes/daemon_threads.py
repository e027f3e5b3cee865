"""Threads for calls that may hang, such as those of a user's code.

Python joins the threads of `concurrent.futures` when a process ends, so that a call that never returns keeps
the process for ever, though nobody waits for its result. It does not join these.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class DaemonThreads:
    """As many as are needed at once, `most` at the most; further calls wait for one that is free."""

    def __init__(self, most: int, name: str) -> None:
        self.most = most
        self._name = name
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        """None: the end of one thread."""
        self._free = threading.Semaphore(0)
        self._starting = threading.Lock()
        self._count = 0
        self._hanging: set[Future[Any]] = set()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """The result to be; what the call raises is its exception."""
        future: Future[Any] = Future()
        self._calls.put((call, future))
        with self._starting:
            if not self._free.acquire(blocking=False) and self._count < self.most:
                self._count += 1
                threading.Thread(target=self._work, name=f"{self._name}-{self._count}", daemon=True).start()
        return future

    def give_up(self, future: Future[Any]) -> bool:
        """For a call that nobody waits for any longer: whether it had begun. If not, it never will."""
        if future.cancel():
            return False
        self._hanging.add(future)
        future.add_done_callback(self._hanging.discard)
        return True

    def close(self) -> None:
        """For the last one that submits: each thread ends once its call has returned. Otherwise they wait for
        calls as long as the process lives."""
        with self._starting:
            for _ in range(self._count):
                self._calls.put(None)

    @property
    def hanging(self) -> int:
        """Calls that were given up and still hold their thread: Python cannot end it."""
        return len(self._hanging)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del item, call, future  # a thread that waits holds nothing of the last call
            self._free.release()
