"""Base of the engines whose model lives in this process: one thread alone touches the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from services.common.errors import UnspiralError
from services.rollout.engines.base import OnTokens
from services.weight_sync.base import WeightSyncError, untouched

T = TypeVar("T")


def on_this_loop(on_tokens: OnTokens | None) -> OnTokens | None:
    """The same for a thread to call. What it tells arrives before the result of the thread's call does."""
    if on_tokens is None:
        return None
    loop = asyncio.get_running_loop()

    def tell(ids: list[int]) -> None:
        loop.call_soon_threadsafe(on_tokens, ids)

    return tell


class OwnThread:
    """Calls of the model, one after the other, and the version of its weights."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._version = 0
        self._usable = True
        """False after a failed load, until a whole version arrives."""
        self._asleep = False

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def _replace(self, version: int, load: Callable[[], Any]) -> None:
        """Load the weights of a version. Raises WeightSyncError, and UnspiralError for any other failure."""

        def replace() -> None:
            # The thread's next call begins before the event loop hears how this one ended: so the flags are
            # set here, in the thread.
            try:
                load()
            except BaseException as e:
                self._usable = self._usable and untouched(e)
                raise
            self._version = version
            self._usable = True

        try:
            await self._call(replace)
        except Exception as e:
            if isinstance(e, WeightSyncError):
                raise
            raise UnspiralError(f"weights of version {version} were not loaded whole: {e}") from e
