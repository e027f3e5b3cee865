"""A run that waits says so: one line per SAY_SECONDS with the thing waited for, and since when."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from services.common.counting import counted
from services.common.processes.beside import beside

if TYPE_CHECKING:
    from trainer.loop.driver import Driver

SAY_SECONDS = 15.0
Say = Callable[[str], None]


@contextmanager
def told(
    say: Say, what: str | Callable[[], str], progress: Callable[[], Any] | None = None
) -> Iterator[None]:
    """While inside, `say` is called from a thread of its own, since the event loop itself may block.

    what: is waited for; a function that gives it may give "" where nothing is. progress: while what this
    gives changes, the wait begins anew.
    """
    with beside(lambda over: _tell(over, say, what, progress), "waits"):
        yield


def _tell(
    over: threading.Event, say: Say, what: str | Callable[[], str], progress: Callable[[], Any] | None
) -> None:
    seen = _asked(progress)
    since = time.monotonic()
    clock = time.strftime("%H:%M:%S")
    last = since
    while not over.wait(min(1.0, SAY_SECONDS / 5)):
        now = time.monotonic()
        new = _asked(progress)
        if new != seen:
            seen = new
            since = now
            last = now
            clock = time.strftime("%H:%M:%S")
        elif now - last >= SAY_SECONDS:
            last = now
            text = what if isinstance(what, str) else _asked(what)
            if text and not over.is_set():
                say(f"waiting since {clock} ({now - since:.0f} s): {text}")


def _asked(function: Callable[[], Any] | None) -> Any:
    """What it gives. It looks at objects of another thread, which may change meanwhile: then the next look
    tells."""
    try:
        return function() if function is not None else None
    except (RuntimeError, KeyError):
        return None


def busy() -> str:
    """Where more processes want to run than there are cores, that it is so; otherwise ""."""
    load = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    return f"; load {load:.0f} on {counted(cores, 'core')}" if load > cores else ""


def waits_of(driver: Driver) -> str:
    """The thing that a run waits for now; "" where it waits for none."""
    if driver.idle:
        return ""
    doing = driver.progress.doing or "the first step"
    if driver.on_learner.doing:
        return doing
    return f"{doing}: {driver.sampler.calls.waits_for() or driver.system.pool.waits_for()}"


def progress_of(driver: Driver) -> tuple[Any, ...]:
    """A value that changes whenever the run gets further. Rewards that come in do not change it: where they
    take long, a line says how many are there."""
    return (
        driver.system.pool.trajectories,
        driver.on_learner.returned,
        driver.progress.doing,
        driver.step,
        driver.attempt,
        driver.idle,
    )
