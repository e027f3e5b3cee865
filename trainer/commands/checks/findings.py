"""Findings, and the helpers that the doctor's checks share."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "note", "bad"]
GIB = 1 << 30
_ask = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
"""Opens an address, by no proxy, as the clients of these services do."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table. `bad` makes the exit status 3."""

    what: str
    level: Level
    seen: str
    advice: str = ""


def status_of(url: str, seconds: float = 5.0) -> tuple[int | None, str]:
    """The HTTP status of what answers at an address, None where nothing does that speaks HTTP; and the reason
    for a status that is none of success."""
    try:
        with _ask(url, timeout=seconds) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as e:
        return e.code, str(e.reason)
    except (OSError, http.client.HTTPException) as e:
        return None, str(getattr(e, "reason", e))


def judged(what: str, good: bool, seen: str, advice: str, otherwise: Level = "bad") -> Finding:
    """`good` without the advice, or `otherwise` with it."""
    return Finding(what, "good", seen) if good else Finding(what, otherwise, seen, advice)
