"""One event loop, in a thread of its own, for a user's `async` code that other threads call.

It lives as long as the process: what a module of the user's keeps open, such as the connections of an HTTP
client, belongs to the loop that made it.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any

_STARTING = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def result_of(function: Callable[..., Any], *given: Any) -> Any:
    """What a user's function gives; of one that is `async` once it is awaited. For a thread that runs no loop
    itself. Raises what it raises; a cancelled task of the function's own is a RuntimeError, since nobody has
    cancelled ours."""
    try:
        value = function(*given)
        return awaited(value) if inspect.isawaitable(value) else value
    except asyncio.CancelledError as error:
        raise RuntimeError("cancelled").with_traceback(error.__traceback__) from error


def awaited(awaitable: Awaitable[Any]) -> Any:
    """Its result, for a thread that runs no loop itself. Raises what it raises."""
    result, error = asyncio.run_coroutine_threadsafe(_ended(awaitable), _running()).result()
    if error is not None:
        raise error
    return result


async def _ended(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """A task that raises SystemExit would end the loop, and with it all others that wait."""
    try:
        return await awaitable, None
    except BaseException as error:
        return None, error


def _running() -> asyncio.AbstractEventLoop:
    global _loop
    with _STARTING:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="own-loop", daemon=True).start()
        return _loop
