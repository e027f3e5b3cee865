"""The search in packed postings: one segment, a batch of queries, compiled, without the interpreter lock.

The rows of a segment are cut into windows. For each window the most that a row in it can score is summed up
from the block maxima of the terms (of rare terms, from the scores themselves), and windows are searched from
the highest such bound down until no bound reaches the best `topk` (block-max pruning: Mallia, Suel and
Tonellotto 2024). Within a window it is MaxScore (Turtle and Flood 1995): terms that can't lift a row into the
best by themselves are only looked up for rows that others have found, and a block of theirs is only unpacked
where its maximum could.

Exact: the same rows, scores and order as adding up everything. A row's score is the sum of its terms' scores,
each rounded to single precision, in the order in which the caller gives the terms. Equal scores go by row.
"""

from __future__ import annotations

import numpy as np

from retriever_service.bm25.kernel import FEW, find, sort_few
from retriever_service.bm25.packed.blocks import BLOCK, compiled, unpack_block, unpack_list
from retriever_service.bm25.packed.impacts import SHIFT, WINDOW

_LISTED_LEAST = 1024
_LISTED_PER_WINDOW = 16
"""A list of up to so many postings (and so many per window) is unpacked at once: bounds are exact then."""
_BUCKETS = 1024
_SLACK = 1.000001
"""Bounds are rounded up, for the rounding of single precision."""
_LEADERS = 32
"""Windows that are searched first, the ones with the highest bounds. By then the best are about known, and
the others are taken as they lie, so that no block is unpacked twice."""
_ADD_LISTED = 2
_ADD_BLOCK = 800
_FIND = 60
_FIND_BLOCK = 400
"""Nanoseconds, about: to add a posting of a listed term, and a block of another; to look a row up, and to
unpack a block for it."""


@compiled
def score_all(rows, tfs, count, weight, idf, lengths, norm, scores):
    """Scores of postings, times the weight of their term."""
    for p in range(count):
        tf = tfs[p]
        scores[p] = weight * np.float32(idf * tf / (tf + norm[lengths[rows[p]]]))


@compiled
def add_scores(rows, scores, factor, at, end, low, high, sums, touched, count):
    """Add postings of a term, from `at` to `end` and as long as their rows lie below `high`, to the window
    that begins with row `low`, remembering the rows. Returns how many are remembered."""
    while at < end and rows[at] < high:
        offset = np.int64(rows[at]) - low
        touched[count] = offset
        # No branch: the row is written always, and counted only where it is new. `touched` has a place more
        # for that.
        count += sums[offset] == 0
        sums[offset] += scores[at] * factor
        at += 1
    return count


@compiled
def window_bounds(
    firsts, maxima, first_block, n_blocks, n_rows, factor, bounds, blocks
):  # fmt: skip
    """Upper bounds of one term by its blocks: `bounds` float32 [windows], and in `blocks` int32 [windows] the
    first block that may have rows of the window, -1 for none."""
    for j in range(first_block, first_block + n_blocks):
        bound = np.float32(maxima[j] * factor)
        last = n_rows - 1
        if j + 1 < first_block + n_blocks:
            last = np.int64(firsts[j + 1]) - 1
        # A block's rows lie anywhere up to the next block's first, so its maximum bounds each window in
        # between.
        for window in range(np.int64(firsts[j]) >> SHIFT, (last >> SHIFT) + 1):
            if blocks[window] < 0:
                blocks[window] = j
            bounds[window] = max(bounds[window], bound)


@compiled
def order_windows(total, floor, order, heads):
    """Windows whose bound reaches `floor`, about from the highest down. Returns how many."""
    most = np.float32(0)
    for window in range(len(total)):
        most = max(most, total[window])
    if most <= 0:
        return 0
    # A counting sort by bound: about from the highest down is enough, and windows of one bucket stay in their
    # order.
    scale = np.float32((_BUCKETS - 1) / most)
    heads[:] = 0
    count = 0
    for window in range(len(total)):
        if total[window] > 0 and total[window] >= floor:
            heads[_BUCKETS - 1 - np.int64(total[window] * scale)] += 1
            count += 1
    begin = 0
    for bucket in range(_BUCKETS):
        size = heads[bucket]
        heads[bucket] = begin
        begin += size
    for window in range(len(total)):
        if total[window] > 0 and total[window] >= floor:
            bucket = _BUCKETS - 1 - np.int64(total[window] * scale)
            order[heads[bucket]] = window
            heads[bucket] += 1
    return count


@compiled
def insert(best, best_rows, size, score, row):
    """Put a row among the best: higher scores first, equal ones by row. Returns how many there are."""
    most = len(best)
    if size == most and (score < best[most - 1] or (score == best[most - 1] and row > best_rows[most - 1])):
        return size
    place = min(size, most - 1)
    while place > 0 and (
        best[place - 1] < score or (best[place - 1] == score and best_rows[place - 1] > row)
    ):
        best[place] = best[place - 1]
        best_rows[place] = best_rows[place - 1]
        place -= 1
    best[place] = score
    best_rows[place] = row
    return min(size + 1, most)


@compiled
def search_packed(
    words, firsts, places, widths, maxima, first_block, frequencies, lengths, dead, norm, drift, base,
    terms, weights, idfs, best, best_rows, size, sums,
):  # fmt: skip
    """Let the rows of one segment compete for the `len(best)` best of one query. Returns how many there are.

    terms: int64, distinct, -1 where the segment lacks the term; weights: float32, how often each stands in
    the query; idfs: float64. `lengths` are the tokens of each row, `norm[length]` the k1 * (1 - b + b *
    length / mean) of today, `drift` the most by which a block's maximum may have grown since it was stored.
    `dead` has a bit per row that is deleted (no byte where none is). `base` is added to the rows that are
    kept. `sums` float32 [WINDOW] is all zero before and after.
    """
    n = len(terms)
    n_rows = len(lengths)
    windows = (n_rows + WINDOW - 1) >> SHIFT
    # Of rare terms the scores themselves are bounds. Of frequent ones only block maxima are cheap enough to
    # read whole.
    limit = max(_LISTED_LEAST, _LISTED_PER_WINDOW * windows)
    room = 0
    for i in range(n):
        if terms[i] >= 0 and frequencies[terms[i]] <= limit:
            room += np.int64(frequencies[terms[i]])
    list_rows = np.empty(room, np.int32)
    list_tfs = np.empty(room, np.int32)
    list_scores = np.empty(room, np.float32)
    # Of a listed term its place in the lists, of another its blocks.
    begin = np.zeros(n, np.int64)
    end = np.zeros(n, np.int64)
    listed = np.zeros(n, np.bool_)
    bounds = np.zeros((n, windows), np.float32)
    blocks = np.full((n, windows), -1, np.int32)
    at = 0
    for i in range(n):
        term = terms[i]
        if term < 0:
            continue
        frequency = np.int64(frequencies[term])
        block = np.int64(first_block[term])
        n_blocks = (frequency + BLOCK - 1) // BLOCK
        if frequency > limit:
            begin[i] = block
            end[i] = block + n_blocks
            factor = weights[i] * idfs[i] * drift * _SLACK
            window_bounds(firsts, maxima, block, n_blocks, n_rows, factor, bounds[i], blocks[i])
            continue
        listed[i] = True
        begin[i] = at
        end[i] = at + frequency
        own = slice(at, at + frequency)
        unpack_list(
            words, firsts, places, widths, block, frequency,
            list_rows[own], list_tfs[own],
        )  # fmt: skip
        score_all(
            list_rows[own], list_tfs[own], frequency, weights[i], idfs[i], lengths, norm, list_scores[own]
        )
        for p in range(at, at + frequency):
            window = list_rows[p] >> SHIFT
            if blocks[i, window] < 0:
                blocks[i, window] = p
            bounds[i, window] = max(bounds[i, window], np.float32(list_scores[p] * _SLACK))
        at += frequency
    total = np.zeros(windows, np.float32)
    for i in range(n):
        for window in range(windows):
            total[window] += bounds[i, window]
    for window in range(windows):
        total[window] *= np.float32(_SLACK)
    order = np.empty(windows, np.int32)
    heads = np.empty(_BUCKETS, np.int64)
    # An earlier segment's best set the floor for this one.
    floor = best[len(best) - 1] if size == len(best) else np.float32(0)
    n_windows = order_windows(total, floor, order, heads)

    # The block of each term that lies unpacked in `held_rows` and `held_tfs`.
    held = np.full(n, -1, np.int64)
    held_rows = np.empty((n, BLOCK), np.int32)
    held_tfs = np.empty((n, BLOCK), np.int32)
    held_counts = np.zeros(n, np.int64)
    scored = np.full(n, -1, np.int64)
    held_scores = np.empty((n, BLOCK), np.float32)
    seen = np.zeros(windows, np.bool_)
    # The rows of a window that some term was added to, then the ones among them that may win.
    touched = np.empty(WINDOW + 1, np.int64)
    suffix = np.zeros(n + 1, np.float32)
    cursor = np.zeros(n, np.int64)

    leaders = min(n_windows, _LEADERS)
    for visit in range(leaders + windows):
        window = np.int64(order[visit]) if visit < leaders else np.int64(visit - leaders)
        if total[window] == 0 or total[window] < floor or seen[window]:
            continue
        seen[window] = True
        low = window << SHIFT
        high = min(low + WINDOW, n_rows)
        for i in range(n - 1, -1, -1):
            # Rounded up: the sum of bounds must not come out below the sum of scores that it bounds.
            suffix[i] = (suffix[i + 1] + bounds[i, window]) * np.float32(1.0000002)
            cursor[i] = blocks[i, window]
        essential = n
        # `<` and not `<=`: windows are not visited in the order of rows, and of equal scores the lower row
        # wins.
        while essential > 0 and suffix[essential - 1] < floor:
            essential -= 1
        count = 0
        added = 0
        while added < n:
            i = added
            if added >= essential:
                if count == 0:
                    break
                # Add what is cheaper to add up than to look rows up in.
                candidates = 0
                for t in range(count):
                    candidates += sums[touched[t]] + suffix[i] >= floor
                if bounds[i, window] > 0:
                    postings = np.int64(frequencies[terms[i]]) * WINDOW // n_rows
                    adding = postings * _ADD_LISTED
                    finding = candidates * _FIND
                    if not listed[i]:
                        adding = (postings // BLOCK + 1) * _ADD_BLOCK
                        finding += min(candidates, postings // BLOCK + 1) * _FIND_BLOCK
                    if finding < adding:
                        break
            added += 1
            if bounds[i, window] == 0:
                continue
            if listed[i]:
                count = add_scores(
                    list_rows, list_scores, np.float32(1), cursor[i], end[i], low, high, sums, touched, count
                )
                continue
            # The most that all other terms can add to a row of this block.
            others = suffix[0] - bounds[i, window]
            factor = weights[i] * idfs[i] * drift * _SLACK
            for j in range(cursor[i], end[i]):
                if firsts[j] >= high:
                    break
                if others + np.float32(maxima[j] * factor) < floor * np.float32(0.999999):
                    continue  # no row of this block can win, whether its sum is whole or not
                if held[i] != j:
                    held_counts[i] = min(BLOCK, np.int64(frequencies[terms[i]]) - (j - begin[i]) * BLOCK)
                    unpack_block(
                        words, np.int64(places[j]), np.int64(widths[j]), np.int64(firsts[j]), held_counts[i],
                        held_rows[i], held_tfs[i],
                    )  # fmt: skip
                    held[i] = j
                if scored[i] != j:
                    score_all(
                        held_rows[i], held_tfs[i], held_counts[i], weights[i], idfs[i], lengths, norm,
                        held_scores[i],
                    )  # fmt: skip
                    scored[i] = j
                p = find(held_rows[i], 0, held_counts[i], low) if firsts[j] < low else 0
                count = add_scores(
                    held_rows[i], held_scores[i], np.float32(1), p, held_counts[i], low, high, sums, touched,
                    count,
                )  # fmt: skip
        left = 0
        for t in range(count):
            offset = touched[t]
            if sums[offset] + suffix[added] >= floor:
                touched[left] = offset
                left += 1
                continue
            sums[offset] = 0
        if left <= FEW:
            sort_few(touched, left)
        if left > FEW:
            touched[:left].sort()
        for t in range(left):
            offset = touched[t]
            score = sums[offset]
            sums[offset] = 0
            if score + suffix[added] < floor:
                continue
            row = low + offset
            for i in range(added, n):
                if score + suffix[i] < floor:
                    break
                if bounds[i, window] == 0:
                    continue
                if listed[i]:
                    cursor[i] = find(list_rows, cursor[i], end[i], row)
                    if cursor[i] < end[i] and list_rows[cursor[i]] == row:
                        score += list_scores[cursor[i]]
                    continue
                j = cursor[i]
                while j + 1 < end[i] and firsts[j + 1] <= row:
                    j += 1
                cursor[i] = j
                if firsts[j] > row:
                    continue
                highest = np.float32(maxima[j] * (weights[i] * idfs[i] * drift * _SLACK))
                if (score + highest + suffix[i + 1]) * np.float32(_SLACK) < floor:
                    # It cannot win: 0 marks that, since every row here has a score.
                    score = np.float32(0)
                    break
                if held[i] != j:
                    held_counts[i] = min(BLOCK, np.int64(frequencies[terms[i]]) - (j - begin[i]) * BLOCK)
                    unpack_block(
                        words, np.int64(places[j]), np.int64(widths[j]), np.int64(firsts[j]),
                        held_counts[i], held_rows[i], held_tfs[i],
                    )  # fmt: skip
                    held[i] = j
                p = find(held_rows[i], 0, held_counts[i], row)
                if p < held_counts[i] and held_rows[i, p] == row:
                    tf = held_tfs[i, p]
                    score += weights[i] * np.float32(idfs[i] * tf / (tf + norm[lengths[row]]))
            if score == 0 or score < floor:
                continue
            # Only asked of a row that would win: few are.
            if len(dead) and dead[row >> 3] >> (row & 7) & 1:
                continue
            size = insert(best, best_rows, size, score, base + row)
            if size == len(best):
                floor = best[size - 1]
    return size


@compiled
def search_batch(
    words, firsts, places, widths, maxima, first_block, frequencies, lengths, dead, norm, drift, base,
    terms, weights, idfs, starts, scores, rows, counts, sums,
):  # fmt: skip
    """As `search_packed`, for queries with the terms `starts[q]:starts[q + 1]`: `scores` float32 and `rows`
    int64 [queries, topk], `counts` int64 [queries] go on from what they hold."""
    for q in range(len(starts) - 1):
        a = starts[q]
        b = starts[q + 1]
        if a == b:
            continue
        counts[q] = search_packed(
            words, firsts, places, widths, maxima, first_block, frequencies, lengths, dead, norm, drift, base,
            terms[a:b], weights[a:b], idfs[a:b], scores[q], rows[q], counts[q], sums,
        )  # fmt: skip
