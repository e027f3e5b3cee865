"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, one: str, more: str | None = None) -> str:
    """Such as `1 search`, `2,000 searches`. more: the plural, where it is more than `one` with an s."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"
