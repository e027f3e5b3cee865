"""Turns of measurements that run beside each other.

Starts take minutes and syncs a tenth of a second, so several sizes start at the same time, and each is timed
while it holds a file that all of them know.
"""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


@asynccontextmanager
async def turn(file: Path | None) -> AsyncIterator[None]:
    """Inside, no other process is inside with the same file. Without one it is always anybody's turn. A
    process that ends gives its turn back."""
    if file is None:
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as held:
        while True:  # not in a thread of its own: that would go on waiting when this is cancelled
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(0.02)
        yield
