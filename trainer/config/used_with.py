"""Keys that mean something only beside another key of their section.

Such a key stays where it is. A discriminated union would move it into a section of its own, and refuse
existing configurations: the `config.yaml` in a run's folder holds every key. Where the key does nothing, a
run and `unspiral config show` say so (`trainer.config.remarks`).
"""

from __future__ import annotations

from typing import Any


class UsedWith:
    """Marks a field that is used where the field `name` of the same section has one of the values; with
    `unlike`, where it has any other value."""

    def __init__(self, name: str, value: str | int, *more: str | int, unlike: bool = False) -> None:
        self.name = name
        self.values = (value, *more)
        self.unlike = unlike

    def is_used(self, section: Any) -> bool:
        return (getattr(section, self.name) in self.values) != self.unlike

    def __str__(self) -> str:
        values = " or ".join(str(value) for value in self.values)
        return f"{self.name} other than {values}" if self.unlike else f"{self.name}={values}"
