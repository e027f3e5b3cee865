"""Running an application in several processes that share a socket, until a signal ends them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping

import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess
from uvicorn.supervisors.multiprocess import Process

from services.common.errors import EnvironmentLacks
from services.common.http.serving import Manner
from services.common.processes import signals
from services.common.processes.parent import when_parent_ends

ANSWER_SECONDS = 60
"""Seconds without a sign of life after which a worker is killed: one that loads ten million terms gives none
for most of a minute, and is well."""
END_SECONDS = 2.0
"""Time beyond its drain for a worker without a parent to end by itself."""
RETRY_SECONDS = 5.0
"""Pause before a worker that could not start is started again, once another one has served."""


class Workers(Multiprocess):
    """uvicorn's supervisor, remembering the signal that ended it, and telling `on_gone` which processes are
    no more, and `on_stop` that it ends.

    A stop waits neither for a worker's sign of life nor without end for its drain.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        sockets: list[socket.socket],
        on_gone: Callable[[int], None],
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config, sockets=sockets)
        self.ended_by: list[int] = []
        self._on_gone = on_gone
        self._on_stop = on_stop
        self._known: set[int] = set()
        self._served = False
        """Some worker has started once: what it serves could be opened."""
        self._retry_at = 0.0

    def run(self) -> None:
        # Wherever uvicorn starts a worker: none is ended by this signal before it listens.
        with signals.kept_from_children(signal.SIGUSR1):
            super().run()

    def handle_signals(self) -> None:
        super().handle_signals()
        # It is blocked here as well, and so comes to no handler.
        if signal.SIGUSR1 in signal.sigpending():
            signal.sigwait({signal.SIGUSR1})
            self.handle_usr1()

    def keep_subprocess_alive(self) -> None:
        for process in self.processes:
            if process.process.is_alive() and not self._answers(process):
                process.kill()  # and another one starts below
                process.join()
        if self._stopping():
            return
        # Before the dead are replaced: in the first round none is known, and a worker may have died in it.
        self._known |= self._pids()
        self._replace_dead()
        running = self._pids()
        for pid in self._known - running:
            self._on_gone(pid)
        self._known = running

    def _replace_dead(self) -> None:
        """uvicorn's own round would ask each worker once more. One that stopped to move since `_answers` then
        holds up the signal to stop, and its own successor, for ANSWER_SECONDS."""
        for place, process in enumerate(self.processes):
            if process.process.is_alive():
                continue
            process.kill()  # closes its pipe; it is dead
            process.join()
            if process.exitcode == STARTUP_FAILURE:
                if not self._served:  # another one would fail in the same way
                    self.should_exit.set()
                    return
                # What is on disk has become bad since: the others go on with what they have open.
                if time.monotonic() < self._retry_at:
                    continue
                self._retry_at = time.monotonic() + RETRY_SECONDS
            self.processes[place] = Process(self.config, self.sockets)
            self.processes[place].start()

    def _pids(self) -> set[int]:
        return {process.pid for process in self.processes if process.pid is not None}

    def _answers(self, process: Process) -> bool:
        """As uvicorn's `ping`, which would look at a signal to stop, or at a worker that died meanwhile, only
        when the time is up."""
        until = time.monotonic() + ANSWER_SECONDS
        try:
            process.parent_conn.send(b"ping")
            while not process.parent_conn.poll(0.2):
                if self._stopping() or not process.process.is_alive():
                    return True
                if time.monotonic() > until:
                    return False
            self._served = process.parent_conn.recv() or self._served
        except (OSError, EOFError):
            return False
        return True

    def _stopping(self) -> bool:
        return self.should_exit.is_set() or bool({signal.SIGINT, signal.SIGTERM} & {*self.signal_queue})

    def join_all(self) -> None:
        until = time.monotonic() + 2 * (self.config.timeout_graceful_shutdown or 0) + 5
        for process in self.processes:
            process.process.join(max(0.0, until - time.monotonic()))
            if process.process.is_alive():
                process.process.kill()
        super().join_all()

    def handle_int(self) -> None:
        self._stop(signal.SIGINT)
        super().handle_int()

    def handle_term(self) -> None:
        self._stop(signal.SIGTERM)
        super().handle_term()

    def handle_usr1(self) -> None:
        """Each worker opens what it serves anew, if it does such a thing. One that starts hears it when it
        listens."""
        for process in self.processes:
            if process.pid is not None and process.process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)

    def _stop(self, number: int) -> None:
        self.ended_by.append(number)
        # The workers close theirs; open here, it would take connections that nobody answers.
        for sock in self.sockets:
            sock.close()
        self._on_stop()


def end_with_parent(drain_seconds: float) -> None:
    """In a worker: stop as at SIGTERM when the process that started it is gone, however it ended. Otherwise
    workers of one that was killed would keep the port, and nobody would know them. One that still loads, and
    hears no signal, ends after `drain_seconds` and a little more."""

    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(drain_seconds + END_SECONDS)
        os._exit(128 + signal.SIGTERM)

    when_parent_ends(end)


def run_workers(
    factory: str,
    count: int,
    sock: socket.socket,
    what: str,
    manner: Manner,
    environment: Mapping[str, str],
    on_gone: Callable[[int], None],
    on_stop: Callable[[], None] = lambda: None,
) -> list[int]:
    """Serve what `factory` (`module:function`) makes in `count` processes with these variables. `on_gone` is
    told each process that is no more, `on_stop` that a signal ends all. Returns the signals that ended them.

    Raises EnvironmentLacks where a process cannot start.
    """
    os.environ.update(environment)
    config = manner.config(factory, factory=True, workers=count, timeout_worker_healthcheck=ANSWER_SECONDS)
    workers = Workers(config, [sock], on_gone, on_stop)
    try:
        workers.run()
    finally:
        for name in environment:
            os.environ.pop(name, None)
    if not workers.ended_by:
        raise EnvironmentLacks(f"{what}: a worker could not start; its reason is in the lines above")
    return workers.ended_by
