"""The ids that are taken, for corpora of many millions of rows."""

from __future__ import annotations

from array import array
from hashlib import blake2b

_SLOTS = 1024


class Taken:
    """A set of texts, each held as 64 bits of its hash: 12 to 24 bytes per text, half of that more while it
    grows.

    Of 21 million texts two have one hash with a chance of 1 in 80,000; the later one counts as taken then.
    """

    def __init__(self) -> None:
        self._count = 0
        self._table = _empty(_SLOTS)

    def __contains__(self, text: str) -> bool:
        return self._table[_slot(self._table, _hash(text))] != 0

    def add(self, text: str) -> None:
        hashed = _hash(text)
        slot = _slot(self._table, hashed)
        if self._table[slot]:
            return
        self._table[slot] = hashed
        self._count += 1
        if 3 * self._count > 2 * len(self._table):
            self._grow()

    def _grow(self) -> None:
        wider = _empty(2 * len(self._table))
        for hashed in self._table:
            if hashed:
                wider[_slot(wider, hashed)] = hashed
        self._table = wider


def _empty(slots: int) -> array[int]:
    return array("Q", bytes(8)) * slots


def _slot(table: array[int], hashed: int) -> int:
    """Where a hash stands, or the free slot for it."""
    last = len(table) - 1
    slot = hashed & last
    while table[slot] not in (0, hashed):
        slot = (slot + 1) & last
    return slot


def _hash(text: str) -> int:
    """64 bits that depend on the text alone; 0 is a free slot."""
    found = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(found, "little") or 1
