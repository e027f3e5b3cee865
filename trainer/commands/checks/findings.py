"""Findings, and the helpers that the doctor's checks share."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

from services.common.errors import UserError

_P = ParamSpec("_P")
_T = TypeVar("_T")
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


late: list[str] = []
"""Parts of the user's that were waited for in vain: their calls may run for ever, in threads that Python's
end waits for."""


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


def tried(
    what: str, seen: str, check: Callable[_P, _T], *given: _P.args, **options: _P.kwargs
) -> _T | Finding:
    """What a check returns. Where it raises UserError, a bad finding with its line."""
    try:
        return check(*given, **options)
    except UserError as error:
        return Finding(what, "bad", seen, str(error))


def judged(what: str, good: bool, seen: str, advice: str, otherwise: Level = "bad") -> Finding:
    """`good` without the advice, or `otherwise` with it."""
    return Finding(what, "good", seen) if good else Finding(what, otherwise, seen, advice)
