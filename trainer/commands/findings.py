"""What the doctor's checks share."""

from __future__ import annotations

import importlib.metadata
import urllib.request
from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
ask = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
"""Opens an address. By no proxy, like the clients of these services."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table. `bad` makes the exit status 3."""

    what: str
    level: Literal["good", "note", "bad"]
    seen: str
    advice: str = ""


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
