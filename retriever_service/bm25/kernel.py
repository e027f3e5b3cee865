"""The search itself: a batch of queries against postings, compiled, without the interpreter lock.

Rows are treated a range at a time, so that the scores being summed stay in the processor's cache and the
queries of a batch meet the same pieces of the postings there. Within a range it is MaxScore (Turtle and Flood
1995): the terms of a query are ordered by the most that each can add, and a term is only read for as long as
some row could still enter the best `topk` with it. Exact: the same rows in the same order as adding up
everything, equal scores by row.
"""

from __future__ import annotations

import numpy as np
from numba import njit

RANGE_ROWS = 16_384
FEW = 64
"""Up to so many rows of a range are remembered one by one; beyond, the range is scanned."""
_BLOCK = 128
_FIND_COST = 24
"""Looking one row up in a list costs about as much as adding so many postings."""
_SLACK = 1.000001
"""Sums of bounds are rounded up, for the rounding of single precision."""


def compiled(function, **options):
    """Compile; keep the machine code between runs where some cache folder can be written. options: of
    `njit`."""
    try:
        return njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # no such folder
        return njit(nogil=True, **options)(function)


@compiled
def find(rows, begin, end, row):
    """First position in `rows[begin:end]` (ascending) that is not below `row`, by galloping."""
    # Galloping first: the wanted row is near `begin` most of the time, and a plain bisection would touch
    # distant memory for each.
    step = 1
    high = begin
    while high < end and rows[high] < row:
        begin = high + 1
        high += step
        step *= 2
    high = min(high, end)
    while begin < high:
        middle = (begin + high) >> 1
        if rows[middle] < row:
            begin = middle + 1
        else:
            high = middle
    return begin


@compiled
def count_above(values, least):
    """How many are above `least`. In this form it becomes vector instructions."""
    count = 0
    for i in range(len(values)):
        count += values[i] > least
    return count


@compiled
def starting_floor(sums, topk):
    """A score that more than `topk` rows exceed, or 0: so that a first range is not searched from nothing."""
    bits = sums.view(
        np.int32
    )  # floats that are not negative compare as their bits do, and integers become vector instructions
    most = np.int32(0)
    for i in range(len(bits)):
        most = max(most, bits[i])
    high = np.array([most]).view(np.float32)[0]
    # A guess that costs three passes over the range: sorting its scores for the exact floor would cost more.
    for share in (0.8, 0.6, 0.4):
        floor = np.float32(high * share)
        if count_above(sums, floor) >= topk:
            return floor
    return np.float32(0)


@compiled
def add(data, indices, at, end, low, high, weight, sums, touched, count):
    """Add one term's postings of the rows [low, high) to `sums`. Returns where the term goes on, and how many
    rows were touched."""
    if at < end and indices[at] < low:
        at = find(indices, at, end, low)
    stop = end if at == end or indices[end - 1] < high else find(indices, at, end, high)
    rows = indices[at:stop]
    scores = data[at:stop]
    for i in range(len(rows)):
        # Unsigned: for a signed index numba would add a test for negative ones, which count from the end.
        sums[np.uint64(rows[i] - low)] += weight * scores[i]
    for i in range(min(len(rows), FEW - count)):
        touched[count] = rows[i]
        count += 1
    return stop, count


@compiled
def order_terms(terms, maxima, indptr, term, weight, bound, at, end):
    """The terms of one query by the most that each can add, repeats merged into weights. Returns how many.

    `bound[i]` becomes the most that terms i and later can add together.
    """
    n = 0
    for i in range(len(terms)):
        j = 0
        while j < n and term[j] != terms[i]:
            j += 1
        if j == n:
            term[n] = terms[i]
            weight[n] = 0
            n += 1
        weight[j] += 1
    for i in range(1, n):
        t = term[i]
        w = weight[i]
        j = i
        while j > 0 and weight[j - 1] * maxima[term[j - 1]] < w * maxima[t]:
            term[j] = term[j - 1]
            weight[j] = weight[j - 1]
            j -= 1
        term[j] = t
        weight[j] = w
    # A suffix sum: with terms ordered by what they can add, it says what all later ones can add together.
    bound[n] = 0
    for i in range(n - 1, -1, -1):
        bound[i] = bound[i + 1] + weight[i] * maxima[term[i]] * _SLACK
        at[i] = indptr[term[i]]
        end[i] = indptr[term[i] + 1]
    return n


@compiled
def sort_few(values, count):
    """Sort `values[:count]` ascending."""
    for a in range(1, count):
        value = values[a]
        b = a
        while b > 0 and values[b - 1] > value:
            values[b] = values[b - 1]
            b -= 1
        values[b] = value


@compiled
def search_range(
    data, indices, indptr, n_docs, low, high, n, term, weight, bound, at, end, sums, touched, best, best_rows,
    size, floor
):  # fmt: skip
    """Let the rows [low, high) compete for the `len(best)` best of one query. `sums` is all zero before and
    after.

    `floor` is the score to beat: that of the last of the best once there are enough, 0 before. Returns size
    and floor.
    """
    essential = n
    # MaxScore: rows that have none of the essential terms cannot beat the floor. Rows go up, and an equal
    # score of a later row does not win: so `<=` is enough.
    while essential > 0 and bound[essential - 1] <= floor:
        essential -= 1
    count = 0
    for i in range(essential):
        at[i], count = add(data, indices, at[i], end[i], low, high, weight[i], sums, touched, count)
    if count == 0:
        return size, floor
    # Rows without an essential term can't win. Of the other terms, read those that are cheaper to add up than
    # to look rows up in.
    width = high - low
    added = essential
    while added < n:
        postings = (end[added] - indptr[term[added]]) * width // n_docs
        if postings * 40 > width:
            candidates = (
                count
                if count < FEW
                else count_above(sums[:width], np.float32(max(floor - bound[added], 0.0)))
            )
            if candidates * _FIND_COST < postings:
                break
        at[added], count = add(
            data, indices, at[added], end[added], low, high, weight[added], sums, touched, count
        )
        added += 1
    # With few rows touched, sorting them is cheaper than scanning the range for them.
    few = count < FEW
    if floor == 0 and added == n and not few:
        floor = starting_floor(sums[:width], len(best))
    if few:
        sort_few(touched, count)
    for block in range(0, count if few else width, 1 if few else _BLOCK):
        first, last = (
            (touched[block] - low, touched[block] - low + 1) if few else (block, min(block + _BLOCK, width))
        )
        if not few and count_above(sums[first:last], np.float32(max(floor - bound[added], 0.0))) == 0:
            continue
        for offset in range(first, last):
            score = sums[offset]
            if score == 0 or score + bound[added] <= floor:
                continue
            if few:
                sums[offset] = 0  # a row touched by two terms is listed twice
            row = low + offset
            for i in range(added, n):
                if score + bound[i] <= floor:
                    break
                at[i] = find(indices, at[i], end[i], row)
                if at[i] < end[i] and indices[at[i]] == row:
                    score += weight[i] * data[at[i]]
            if score > floor:
                place = min(size, len(best) - 1)
                while place > 0 and best[place - 1] < score:
                    best[place] = best[place - 1]
                    best_rows[place] = best_rows[place - 1]
                    place -= 1
                best[place] = score
                best_rows[place] = row
                size = min(size + 1, len(best))
                if size == len(best):
                    floor = best[size - 1]
    if few:
        for i in range(count):
            sums[touched[i] - low] = 0
    else:
        sums[:width] = 0
    return size, floor


@compiled
def rank(data, indices, indptr, maxima, n_docs, terms, starts, rows, scores, counts, sums):
    """The best rows of each query: `rows` int32 and `scores` float32 [queries, topk] are filled, `counts`
    [queries] says how far.

    Query q has the terms `terms[starts[q]:starts[q + 1]]`. Term t has the postings `indptr[t]` to `indptr[t +
    1]` of `indices` (rows, ascending) and `data` (scores); `maxima[t]` is its highest score. `sums` float32
    [RANGE_ROWS] is all zero before and after.
    """
    queries = len(starts) - 1
    total = len(terms)
    term = np.empty(total, np.int64)
    weight = np.empty(total, np.float32)
    at = np.empty(total, np.int64)
    end = np.empty(total, np.int64)
    bound = np.empty(total + queries, np.float64)
    n = np.empty(queries, np.int64)
    floor = np.zeros(queries, np.float32)
    touched = np.empty(FEW, np.int64)
    for q in range(queries):
        a = starts[q]
        b = starts[q + 1]
        n[q] = order_terms(
            terms[a:b], maxima, indptr, term[a:b], weight[a:b], bound[a + q : b + q + 1], at[a:b], end[a:b]
        )
        counts[q] = 0
    for low in range(0, n_docs, RANGE_ROWS):
        high = min(low + RANGE_ROWS, n_docs)
        # All queries of a batch in one range before the next one: the postings of the range are in the cache
        # then.
        for q in range(queries):
            a = starts[q]
            b = starts[q + 1]
            counts[q], floor[q] = search_range(
                data, indices, indptr, n_docs, low, high, n[q], term[a:b], weight[a:b],
                bound[a + q : b + q + 1], at[a:b], end[a:b], sums, touched, scores[q], rows[q], counts[q],
                floor[q],
            )  # fmt: skip
