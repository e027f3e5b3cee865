"""Posting lists in blocks of up to 128: the distances between rows and the term frequencies, each in as few
bits as the widest of its block needs.

Block j has its first row in `firsts[j]`, the widths of its rows and frequencies in `widths[j]` (low and high
byte), and its bits from word `places[j]` on: the `count - 1` distances less one, then, in a word of their
own, the `count` frequencies less one. `maxima[j]` is the highest tf / (tf + norm) of its postings, by which a
search passes over it (Ding and Suel 2011, "Faster top-k document retrieval using block-max indexes").
"""

from __future__ import annotations

import numpy as np

from retriever_service.bm25 import kernel

BLOCK = 128
"""Postings per block; the last one of a list has fewer."""


def compiled(function):
    """As `kernel.compiled`. A division by zero, which can't be, is not looked for, so that loops with
    divisions become vector instructions."""
    return kernel.compiled(function, error_model="numpy")


@compiled
def words_of(count, bits):
    """Words of 32 bits that `count` values of `bits` bits take."""
    return (count * bits + 31) >> 5


@compiled
def bits_of(value):
    """Bits that a value needs."""
    bits = 0
    while value > 0:
        value >>= 1
        bits += 1
    return bits


@compiled
def put_bits(words, place, index, bits, value):
    """Store `value` as number `index` of the values of `bits` bits from word `place` on. The words are zero
    before."""
    position = index * bits
    word = place + (position >> 5)
    shifted = np.uint64(value) << np.uint64(position & 31)
    words[word] |= np.uint32(shifted & np.uint64(0xFFFFFFFF))
    high = np.uint32(shifted >> np.uint64(32))
    if high:
        words[word + 1] |= high


@compiled
def pack_lists(
    rows, tfs, starts, lengths, norm, words, first_word, firsts, places, widths, maxima, frequencies,
):  # fmt: skip
    """Pack the posting lists `starts[i]:starts[i + 1]` of `rows` (ascending) and `tfs` (from 1).

    `words` uint32 is filled from its beginning, which is word `first_word` of the index; so are `firsts`
    uint32, `places` uint32, `widths` uint16 and `maxima` float32 (one per block) and `frequencies` uint32
    (one per list). `norm[length]` is k1 * (1 - b + b * length / mean). Returns the words and the blocks used.
    """
    word = 0
    block = 0
    for i in range(len(starts) - 1):
        frequencies[i] = starts[i + 1] - starts[i]
        for begin in range(starts[i], starts[i + 1], BLOCK):
            end = min(begin + BLOCK, starts[i + 1])
            all_rows = 0
            all_tfs = 0
            best = 0.0
            for at in range(begin, end):
                if at > begin:
                    # Or and not max: only the number of bits counts, and it is the same. Gaps are kept less
                    # 1, since rows of a list never repeat.
                    all_rows |= rows[at] - rows[at - 1] - 1
                tf = np.int64(tfs[at])
                all_tfs |= tf - 1
                # Without the idf and the query's weight, which change: the bound of a block is multiplied by
                # them when it is asked for.
                best = max(best, tf / (tf + norm[lengths[rows[at]]]))
            row_bits = bits_of(all_rows)
            tf_bits = bits_of(all_tfs)
            firsts[block] = rows[begin]
            places[block] = first_word + word
            widths[block] = row_bits | (tf_bits << 8)
            maxima[block] = best
            size = words_of(end - begin - 1, row_bits) + words_of(end - begin, tf_bits)
            words[word : word + size] = 0
            if row_bits:
                for at in range(begin + 1, end):
                    put_bits(words, word, at - begin - 1, row_bits, rows[at] - rows[at - 1] - 1)
            if tf_bits:
                tf_place = word + words_of(end - begin - 1, row_bits)
                for at in range(begin, end):
                    put_bits(words, tf_place, at - begin, tf_bits, np.int64(tfs[at]) - 1)
            word += size
            block += 1
    return word, block


@compiled
def get_bits(words, place, bits, values):
    """Read `len(values)` values of `bits` bits from word `place` on into `values` int32. Unsigned, so that no
    index is looked at for being negative."""
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    first = np.uint64(place)
    step = np.uint64(bits)
    for i in range(np.uint64(len(values))):
        position = np.uint64(i) * step
        word = first + (position >> np.uint64(5))
        pair = np.uint64(words[word]) | (np.uint64(words[word + np.uint64(1)]) << np.uint64(32))
        values[i] = np.int32((pair >> (position & np.uint64(31))) & mask)


@compiled
def unpack_block(words, place, width, first, count, rows, tfs):
    """Unpack one block of `count` postings into `rows` and `tfs` (int32, from their beginnings)."""
    bits = np.int64(width & 255)
    rows[:count] = 0
    if bits > 0:
        get_bits(words, place, bits, rows[1:count])
    row = np.int32(first - 1)
    for i in range(np.uint64(count)):
        row += rows[i] + np.int32(1)
        rows[i] = row
    place += words_of(count - 1, bits)
    bits = np.int64(width >> 8)
    tfs[:count] = 0
    if bits > 0:
        get_bits(words, place, bits, tfs[:count])
    for i in range(np.uint64(count)):
        tfs[i] += np.int32(1)


@compiled
def unpack_list(words, firsts, places, widths, block, frequency, rows, tfs):
    """Unpack a whole list, whose first block is `block`, into `rows` and `tfs` (int32 [frequency])."""
    for begin in range(0, frequency, BLOCK):
        count = min(BLOCK, frequency - begin)
        unpack_block(
            words, np.int64(places[block]), np.int64(widths[block]), np.int64(firsts[block]), count,
            rows[begin : begin + count], tfs[begin : begin + count],
        )  # fmt: skip
        block += 1


@compiled
def find_term(text, offsets, order, wanted):
    """Number of the term whose UTF-8 bytes are `wanted`, or -1.

    Term t has the bytes `text[offsets[t]:offsets[t + 1] - 1]` (a line break follows); `order` lists the terms
    in the order of their bytes.
    """
    low = 0
    high = len(order)
    size = len(wanted)
    while low < high:
        middle = (low + high) >> 1
        term = np.int64(order[middle])
        begin = np.int64(offsets[term])
        have = np.int64(offsets[term + 1]) - 1 - begin
        at = 0
        while at < have and at < size and text[begin + at] == wanted[at]:
            at += 1
        if at == have and at == size:
            return term
        if at == have or (at < size and text[begin + at] < wanted[at]):
            low = middle + 1
        else:
            high = middle
    return -1
