"""A run's folder that is moved, removed or replaced while its run goes on.

Two runs must never write to one folder, which a lock in it cannot promise: a new folder of the same name has
a lock of its own. So the run looks at the folder that it opened, and not at the name.
"""

from __future__ import annotations

import os
from pathlib import Path

from services.common.errors import EnvironmentLacks

_GONE = " (deleted)"
"""What Linux puts behind the name of an open folder that was removed."""


class HeldFolder:
    """An open folder, and where it lies now."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._place = self._now()

    def close(self) -> None:
        os.close(self._handle)

    def moved_to(self) -> Path | None:
        """Its new place, where it was moved; the old one, where it was removed. None: it lies where it lay.

        Raises EnvironmentLacks where it was removed, and there is another one in its place."""
        now = self._now()
        if now == self._place:
            return None
        if not now.endswith(_GONE):
            return Path(now)
        if self.path.exists():
            raise EnvironmentLacks(
                f"{self.path}: removed while the run went on, and another folder has its name by now: "
                "nothing is written there"
            )
        return self.path

    def _now(self) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{self._handle}")
        except OSError:  # no /proc: nothing is known, and all that is written goes by the name
            return str(self.path)
