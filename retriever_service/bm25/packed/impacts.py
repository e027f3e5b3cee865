"""A second form of the frequent terms' postings, which a search adds up without unpacking anything: 16 bits
per posting, the row inside its window (SHIFT bits) and, in the 4 bits above, a level of its impact, which is
tf / (tf + norm).

`levels[k, l]` is the most that an impact of term k at level l can be, so the sums are bounds. `windows[k, w]`
is the place of the first posting of window w among those of the term, and `tops[k, w]` the highest level in
it. The place of a posting says where its term frequency is packed, so the rows that may win are scored
exactly without unpacking a block.
"""

from __future__ import annotations

import numpy as np

from retriever_service.bm25.packed.blocks import BLOCK, compiled, words_of

SHIFT = 12
WINDOW = 1 << SHIFT
"""Rows per window."""
LEVELS = 16
_LEAST = 1024
_PER_WINDOW = 16
_UP = 1.000001
"""For the rounding of single precision."""


def least_frequency(rows: int) -> int:
    """Postings from which on a term of an index of so many rows has them in this form."""
    return max(_LEAST, _PER_WINDOW * windows_of(rows)) + 1


def windows_of(rows: int) -> int:
    """Windows of so many rows."""
    return (rows + WINDOW - 1) >> SHIFT


@compiled
def impact_of(tfs, rows, at, lengths, norm):
    """tf / (tf + norm) of a posting."""
    tf = np.int64(tfs[at])
    return tf / (tf + norm[lengths[rows[at]]])


@compiled
def pack_impacts(rows, tfs, starts, chosen, lengths, norm, postings, levels, windows, tops):
    """Write the lists `chosen` of `rows` and `tfs` (as `pack_lists` takes them) in this form: `postings`
    uint16, one list behind another, and per list `levels` float32 [LEVELS], `windows` uint32 [windows + 1]
    and `tops` uint8 [windows]."""
    to = 0
    for k in range(len(chosen)):
        begin = starts[chosen[k]]
        end = starts[chosen[k] + 1]
        least = 1.0
        most = 0.0
        for at in range(begin, end):
            impact = impact_of(tfs, rows, at, lengths, norm)
            least = min(least, impact)
            most = max(most, impact)
        step = max(most - least, 1e-9) / LEVELS
        for level in range(LEVELS):
            levels[k, level] = (least + (level + 1) * step) * _UP
        tops[k] = 0
        window = -1
        for at in range(begin, end):
            row = np.int64(rows[at])
            while window < row >> SHIFT:
                window += 1
                windows[k, window] = at - begin
            impact = impact_of(tfs, rows, at, lengths, norm)
            level = min(np.int64((impact - least) / step), LEVELS - 1)
            tops[k, window] = max(tops[k, window], level)
            postings[to] = (row & (WINDOW - 1)) | (level << SHIFT)
            to += 1
        while window < tops.shape[1]:
            window += 1
            windows[k, window] = end - begin


@compiled
def frequency_at(words, places, widths, first_block, frequency, place):
    """The term frequency of posting `place` of a list, whose first block is `first_block`."""
    block = first_block + place // BLOCK
    count = min(BLOCK, frequency - (place // BLOCK) * BLOCK)
    width = np.int64(widths[block])
    bits = width >> 8
    if bits == 0:
        return 1
    position = (place % BLOCK) * bits
    word = np.int64(places[block]) + words_of(count - 1, width & 255) + (position >> 5)
    pair = np.uint64(words[word]) | (np.uint64(words[word + 1]) << np.uint64(32))
    return (
        np.int64((pair >> np.uint64(position & 31)) & ((np.uint64(1) << np.uint64(bits)) - np.uint64(1))) + 1
    )
