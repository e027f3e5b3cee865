"""What the checks of whole systems share: steps said with their time, waits that end, and a run's files of
lines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

began = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)


def until(
    what: str, look: Callable[[], Any], limit: float, otherwise: Callable[[], None] = lambda: None
) -> Any:
    """The first true value that `look` gives; calls `otherwise` and ends the check where none comes in
    `limit` seconds."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.5)
    otherwise()
    raise SystemExit(f"not seen within {limit:g} s: {what}")


def records(text: str) -> list[dict[str, Any]]:
    """The whole lines of a .jsonl file; the last may be in the writing."""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]
