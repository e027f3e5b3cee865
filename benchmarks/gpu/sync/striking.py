"""A blow to a worker in mid-broadcast, and whether it broke anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

SHARES = (0.3, 0.15, 0.05, 0.0)
"""Parts of a sync's usual time after which the blow comes, one try each."""


class Blow(NamedTuple):
    """One try. The sync was broken where the worker did not get the version."""

    worker: str
    broke: bool
    seconds: float = 0.0
    """From the blow to the end of the sync."""
    at: float = 0.0
    """Time (monotonic) of the blow."""


async def struck(
    sync: Callable[[], Awaitable[Any]],
    under_way: Callable[[], bool],
    strike: Callable[[], None],
    delay: float,
) -> float | None:
    """Begin a sync, and strike `delay` seconds after it is under way. Returns the seconds from the blow to
    its end; None where it had ended before, and nothing was struck."""
    syncing = asyncio.ensure_future(sync())
    while not under_way() and not syncing.done():
        await asyncio.sleep(0.001)
    await asyncio.wait([syncing], timeout=delay)
    if syncing.done():
        await syncing
        return None
    strike()
    began = time.monotonic()
    await syncing
    return time.monotonic() - began


def failed(events: list[dict[str, Any]], worker: str) -> bool:
    """Whether the pool noted that a sync did not reach this worker. One that was struck once it had the
    whole version is lost without it."""
    return any(event["event"] == "sync_failed" and event["worker"] == worker for event in events)


async def until_broken(strike: Callable[[float], Awaitable[Blow]], say: Callable[[str], None]) -> Blow | None:
    """Strike, sooner each time, until a sync is broken; None where none was."""
    for share in SHARES:
        blow = await strike(share)
        if blow.broke:
            return blow
        say(f"nothing was broken: {blow.worker} had the weights before the blow at {share:g} of a sync")
    return None
