"""Numbers in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, one: str, more: str | None = None) -> str:
    """Such as `1 search`, `2,000 searches`. more: the plural, where it is more than `one` with an s."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def malformed(bad: int, rows: int, *, whole: bool, what: str = "rows") -> str:
    """Such as `3 of its 343 rows are malformed`. whole: whether these are all rows of the file."""
    return (
        f"{bad:,} of its {'' if whole else 'first '}{rows:,} {what} {'is' if bad == 1 else 'are'} malformed"
    )


SHOWN_LEFT_OUT = 3
"""Rows that were left out of which a command says why."""


def left_out(count: int, what: str, reasons: Sequence[str], *, one: str = "row") -> list[str]:
    """The lines about rows that a command has left out: how many, and the first reasons; none where
    none was. what: the kind of them, such as `malformed`; one: what is counted."""
    if not count:
        return []
    shown = reasons[:SHOWN_LEFT_OUT]
    some = f"; the first {len(shown)}" if len(shown) < count else ""
    return [f"{counted(count, f'{one} was', f'{one}s were')} left out, {what}{some}:", *shown]


def size_of(number: int) -> str:
    """Bytes as `2.5 GiB`; below a tenth of one as `16 MiB`, of which a small disk is a matter."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 / 10 else f"{number / 2**20:.0f} MiB"
