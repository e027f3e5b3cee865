"""The process of an engine, from its first moment to the end of whom it belongs to.

vLLM builds an engine in a call that cannot be cancelled, and starts the process in its middle. A start that
is given up (Ctrl-C while the model loads) would leave that process behind, which waits minutes for a parent
that has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar

import psutil

from services.rollout.engines import vllm_held_outputs
from services.rollout.engines.owner import OWNER_VARIABLE, end_with

T = TypeVar("T")
LOOK_SECONDS = 0.1
"""How often processes of a start that was given up are looked for."""
_ORIGINAL = "unspiral_run_engine_core"
# vLLM's CPU build warns of it at each import, in this process and in the engine's.
logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)


class Start(Generic[T]):
    """A thread that builds an engine, and what it starts. Neither a caller that is cancelled nor the end of
    this process waits for it."""

    def __init__(self, build: Callable[[Start[T]], T]) -> None:
        self._build = build
        # vLLM does not say which processes it starts: they are those that are new.
        self._before = set(psutil.Process().children(recursive=True))
        self._given_up = threading.Event()
        self._over = threading.Event()

    def check(self) -> None:
        """For `build`, before it starts a process. Raises CancelledError where nobody waits any more."""
        if self._given_up.is_set():
            raise CancelledError

    def processes(self) -> list[psutil.Process]:
        """The processes that were started here."""
        return [p for p in psutil.Process().children(recursive=True) if p not in self._before]

    def end(self) -> None:
        """Let the thread go. Linux ends a process with the thread that started it (`owner.end_with`), so it
        stays until the engine is closed."""
        self._over.set()

    async def result(self) -> T:
        """The engine. Raises what `build` raises. A caller that is cancelled goes at once, and the processes
        that `build` starts are ended."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(value)  # type: ignore[arg-type]  # None only beside an error
            else:
                done.set_exception(error)

        def run() -> None:
            value = error = None
            try:
                value = self._build(self)
            except BaseException as e:
                error = e
            if error is not None or self._given_up.is_set():
                self._over.set()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(settle, value, error)
            self._over.wait()

        thread = threading.Thread(target=run, name="engine-start", daemon=True)
        thread.start()
        try:
            return await done
        except asyncio.CancelledError:
            self._given_up.set()
            self._kill()
            threading.Thread(target=self._kill_all, args=(thread,), name="engine-end", daemon=True).start()
            raise

    def _kill(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                # Python's tracker of shared memory ends by itself, and complains if it is ended.
                if not any("resource_tracker" in word for word in process.cmdline()):
                    process.kill()

    def _kill_all(self, thread: threading.Thread) -> None:
        """Until `build` is over: vLLM gives up when its process is gone."""
        while thread.is_alive() and not self._over.is_set():
            self._kill()
            self._over.wait(LOOK_SECONDS)
        self._kill()


class Target:
    """vLLM's target of an engine's process. The process ends with its owner before anything slow is
    imported."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        _belonging()(*args, **kwargs)

    def __reduce__(self) -> Any:
        # A spawned process reads its target first, and imports vLLM for the arguments.
        return _belonging, ()


def _belonging() -> Callable[..., None]:
    end_with(int(os.environ[OWNER_VARIABLE]))
    return _run_engine_core


def _run_engine_core(*args: Any, **kwargs: Any) -> None:
    from vllm.v1.engine.core import EngineCoreProc

    vllm_held_outputs.install()
    # A forked process has the class as `install` left it, a spawned one as vLLM made it.
    getattr(EngineCoreProc, _ORIGINAL, EngineCoreProc.run_engine_core)(*args, **kwargs)


def install() -> None:
    """For engines that are made in this process from now on. May be called again."""
    from vllm.v1.engine.core import EngineCoreProc

    if not hasattr(EngineCoreProc, _ORIGINAL):
        setattr(EngineCoreProc, _ORIGINAL, staticmethod(EngineCoreProc.run_engine_core))
        EngineCoreProc.run_engine_core = Target()
