"""Waits that end with an error of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def within(seconds: float, late: Callable[[], Exception]) -> AsyncIterator[None]:
    """As `asyncio.timeout`, and raises what `late` makes in place of a TimeoutError, which names no key."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise late() from error
