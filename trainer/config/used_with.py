"""Keys that mean something only beside another key of their section.

Such a key stays where it is. A discriminated union would move it into a section of its own, and refuse
existing configurations: the `config.yaml` in a run's folder holds every key. Where the key does nothing, a
run and `unspiral config show` say so (`trainer.config.remarks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class UsedWith:
    """Marks a field that is used where the field `name` of the same section is `value`; with `unlike`, where
    it is anything else."""

    name: str
    value: str | int
    unlike: bool = False

    def is_used(self, section: Any) -> bool:
        return (getattr(section, self.name) == self.value) != self.unlike

    def __str__(self) -> str:
        return f"{self.name} other than {self.value}" if self.unlike else f"{self.name}={self.value}"
