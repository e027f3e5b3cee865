"""The search where frequent terms have impacts (`retriever_service.bm25.packed.impacts`).

Windows are taken as in `retriever_service.bm25.packed.kernel`, but what is summed up in a window are bounds:
of the rare terms their scores, of the frequent ones the levels of their impacts. MaxScore (Turtle and Flood
1995) says which terms a row needs to be one of the best; the others are added, or looked up for few rows, for
as long as a row is left. The rows whose sum reaches the best are scored anew, exactly: the same sums in the
same order as in the other kernel, so rows, scores and order are the same to the bit.
"""

from __future__ import annotations

import numpy as np

from retriever_service.bm25.kernel import FEW, find
from retriever_service.bm25.packed.blocks import compiled, unpack_list
from retriever_service.bm25.packed.impacts import LEVELS, SHIFT, WINDOW, frequency_at
from retriever_service.bm25.packed.kernel import add_scores, insert, order_windows, score_all

_BUCKETS = 1024
_LEADERS = 32
"""Windows that are searched first, the ones with the highest bounds."""
_FIND = 12
"""Looking a row up in a list costs about as much as adding so many postings."""


@compiled
def number_of(terms, term):
    """Number of `term` among `terms` (ascending), -1 where it is none of them."""
    low = 0
    high = len(terms)
    while low < high:
        middle = (low + high) >> 1
        if terms[middle] < term:
            low = middle + 1
        else:
            high = middle
    return low if low < len(terms) and terms[low] == term else -1


@compiled
def find_offset(postings, begin, end, offset):
    """Place of the row `offset` of a window in `postings[begin:end]`, -1 where it is none of them."""
    low = begin
    high = end
    while low < high:
        middle = (low + high) >> 1
        if (postings[np.uint64(middle)] & np.uint16(WINDOW - 1)) < offset:
            low = middle + 1
        else:
            high = middle
    return low if low < end and (postings[np.uint64(low)] & np.uint16(WINDOW - 1)) == offset else -1


@compiled
def add_new(postings, begin, end, bounds, sums, touched, count):
    """Add the postings of a term in one window, remembering the rows. Returns how many are remembered."""
    # Unsigned: numba would test signed indexes for negative ones. Without a branch: every row is written
    # down, and its place kept only where the row is new.
    for p in range(np.uint64(begin), np.uint64(end)):
        posting = np.uint64(postings[p])
        offset = posting & np.uint64(WINDOW - 1)
        touched[np.uint64(count)] = offset
        count += sums[offset] == 0
        sums[offset] += bounds[posting >> np.uint64(SHIFT)]
    return count


@compiled
def add_known(postings, begin, end, bounds, sums):
    """Add the postings of a term in one window."""
    for p in range(np.uint64(begin), np.uint64(end)):
        posting = np.uint64(postings[p])
        sums[posting & np.uint64(WINDOW - 1)] += bounds[posting >> np.uint64(SHIFT)]


@compiled
def keep_above(touched, count, sums, least):
    """Keep the rows whose sum reaches `least`, and forget the sums of the others. Returns how many stay."""
    kept = 0
    for t in range(count):
        offset = np.uint64(touched[np.uint64(t)])
        value = sums[offset]
        # Without a branch too: which rows stay cannot be foreseen.
        keep = value >= least
        touched[np.uint64(kept)] = touched[np.uint64(t)]
        kept += keep
        sums[offset] = value if keep else np.float32(0)
    return kept


@compiled
def put_highest_first(touched, sums, most):
    """Put the rows with the `most` highest sums first, up to FEW of them."""
    for t in range(min(most, len(touched) - 1, FEW)):
        highest = t
        for u in range(t + 1, len(touched)):
            if sums[touched[u]] > sums[touched[highest]]:
                highest = u
        offset = touched[t]
        touched[t] = touched[highest]
        touched[highest] = offset


@compiled
def search_impacts(
    words, firsts, places, widths, maxima, first_block, frequencies, lengths, dead, norm, drift, base,
    impact_terms, impact_begins, impact_postings, impact_levels, impact_windows, impact_tops,
    terms, weights, idfs, best, best_rows, size, sums,
):  # fmt: skip
    """As `retriever_service.bm25.packed.kernel.search_packed`, with the impacts of the terms `impact_terms`
    (ascending): those of number k from `impact_begins[k]` on."""
    n = len(terms)
    windows = impact_tops.shape[1]
    # Each addition rounds once more: a bound may be too high, and never too low.
    slack = np.float32(1.000001 + 1.2e-7 * n)
    number = np.full(n, -1, np.int64)
    room = 0
    for i in range(n):
        if terms[i] >= 0:
            number[i] = number_of(impact_terms, terms[i])
            room += np.int64(frequencies[terms[i]]) if number[i] < 0 else 0
    list_rows = np.empty(room, np.int32)
    list_tfs = np.empty(room, np.int32)
    list_scores = np.empty(room, np.float32)
    # The postings of a term: a listed one's in the lists, another's among the impacts.
    begin = np.zeros(n, np.int64)
    end = np.zeros(n, np.int64)
    bounds = np.zeros((n, windows), np.float32)
    level_bounds = np.zeros((n, LEVELS), np.float32)
    list_at = np.zeros((n, windows + 1), np.int32)
    total = np.zeros(windows, np.float32)
    at = 0
    for i in range(n):
        term = terms[i]
        if term < 0:
            continue
        frequency = np.int64(frequencies[term])
        k = number[i]
        if k >= 0:
            begin[i] = impact_begins[k]
            end[i] = begin[i] + frequency
            # What is stored is neither of this query nor of today's mean length.
            factor = weights[i] * idfs[i] * drift * slack
            for level in range(LEVELS):
                level_bounds[i, level] = impact_levels[k, level] * factor * slack
            for window in range(windows):
                if impact_windows[k, window] != impact_windows[k, window + 1]:
                    bounds[i, window] = level_bounds[i, impact_tops[k, window]]
        else:
            begin[i] = at
            end[i] = at + frequency
            unpack_list(
                words, firsts, places, widths, np.int64(first_block[term]), frequency,
                list_rows[at : end[i]], list_tfs[at : end[i]],
            )  # fmt: skip
            score_all(
                list_rows[at : end[i]], list_tfs[at : end[i]], frequency, weights[i], idfs[i], lengths, norm,
                list_scores[at : end[i]],
            )  # fmt: skip
            window = -1
            for p in range(at, end[i]):
                own = np.int64(list_rows[p]) >> SHIFT
                while window < own:
                    window += 1
                    list_at[i, window] = p
                bounds[i, own] = max(bounds[i, own], np.float32(list_scores[p] * slack))
            while window < windows:
                window += 1
                list_at[i, window] = end[i]
            at = end[i]
        for window in range(windows):
            total[window] += bounds[i, window]
    for window in range(windows):
        total[window] *= slack
    order = np.empty(windows, np.int32)
    heads = np.empty(_BUCKETS, np.int64)
    floor = best[len(best) - 1] if size == len(best) else np.float32(0)
    leaders = min(order_windows(total, floor, order, heads), _LEADERS)
    seen = np.zeros(windows, np.bool_)
    touched = np.empty(WINDOW + 1, np.int32)
    suffix = np.zeros(n + 1, np.float32)

    # The windows with the highest bounds first: they raise the floor, below which most others are passed
    # over. The rest as they lie in memory.
    for visit in range(leaders + windows):
        window = np.int64(order[visit]) if visit < leaders else np.int64(visit - leaders)
        if total[window] == 0 or total[window] < floor or seen[window]:
            continue
        seen[window] = True
        low = window << SHIFT
        for i in range(n - 1, -1, -1):
            suffix[i] = (suffix[i + 1] + bounds[i, window]) * np.float32(1.0000002)
        essential = n
        # `<`: windows come in any order, so that an equal score of an earlier row still counts.
        while essential > 0 and suffix[essential - 1] < floor:
            essential -= 1
        count = 0
        for i in range(essential):
            if bounds[i, window] == 0:
                continue
            k = number[i]
            if k >= 0:
                count = add_new(
                    impact_postings, begin[i] + impact_windows[k, window],
                    begin[i] + impact_windows[k, window + 1], level_bounds[i], sums, touched, count,
                )  # fmt: skip
                continue
            count = add_scores(
                list_rows, list_scores, slack, np.int64(list_at[i, window]),
                np.int64(list_at[i, window + 1]), low, low + WINDOW, sums, touched, count,
            )  # fmt: skip
        spilt = False
        for i in range(essential, n):
            count = keep_above(touched, count, sums, floor - suffix[i])
            if count == 0:
                break
            if bounds[i, window] == 0:
                continue
            k = number[i]
            if k >= 0:
                first = begin[i] + impact_windows[k, window]
                last = begin[i] + impact_windows[k, window + 1]
                # Adding all of it is cheaper than finding so many rows; it also leaves sums at rows that
                # nobody remembers, so that all of `sums` is cleared in the end (`spilt`).
                if count * _FIND > last - first:
                    add_known(impact_postings, first, last, level_bounds[i], sums)
                    spilt = True
                    continue
                for t in range(count):
                    p = find_offset(impact_postings, first, last, touched[t])
                    if p >= 0:
                        sums[touched[t]] += level_bounds[i, impact_postings[p] >> np.uint16(SHIFT)]
                continue
            for p in range(list_at[i, window], list_at[i, window + 1]):
                sums[np.int64(list_rows[p]) - low] += list_scores[p] * slack
                spilt = True
        if floor == 0:
            # Scored first, they give a floor that spares the others.
            put_highest_first(touched[:count], sums, len(best))
        for t in range(count):
            offset = np.int64(touched[t])
            if sums[offset] * slack < floor:
                continue
            row = low + offset
            if len(dead) and dead[row >> 3] >> (row & 7) & 1:
                continue
            score = np.float32(0)
            for i in range(n):
                if bounds[i, window] == 0:
                    continue
                k = number[i]
                if k < 0:
                    p = find(list_rows, np.int64(list_at[i, window]), np.int64(list_at[i, window + 1]), row)
                    if p < list_at[i, window + 1] and list_rows[p] == row:
                        score += list_scores[p]
                    continue
                p = find_offset(
                    impact_postings, begin[i] + impact_windows[k, window],
                    begin[i] + impact_windows[k, window + 1], offset,
                )  # fmt: skip
                if p < 0:
                    continue
                term = terms[i]
                tf = frequency_at(
                    words, places, widths, np.int64(first_block[term]), np.int64(frequencies[term]),
                    p - begin[i],
                )  # fmt: skip
                score += weights[i] * np.float32(idfs[i] * tf / (tf + norm[lengths[row]]))
            if score < floor:
                continue
            size = insert(best, best_rows, size, score, base + row)
            if size == len(best):
                floor = best[size - 1]
        if spilt:
            sums[:] = 0
        for t in range(count):
            sums[touched[t]] = 0
    return size


@compiled
def search_batch_impacts(
    words, firsts, places, widths, maxima, first_block, frequencies, lengths, dead, norm, drift, base,
    impact_terms, impact_begins, impact_postings, impact_levels, impact_windows, impact_tops,
    terms, weights, idfs, starts, scores, rows, counts, sums,
):  # fmt: skip
    """As `retriever_service.bm25.packed.kernel.search_batch`."""
    for q in range(len(starts) - 1):
        a = starts[q]
        b = starts[q + 1]
        if a == b:
            continue
        counts[q] = search_impacts(
            words, firsts, places, widths, maxima, first_block, frequencies, lengths, dead, norm, drift, base,
            impact_terms, impact_begins, impact_postings, impact_levels, impact_windows, impact_tops,
            terms[a:b], weights[a:b], idfs[a:b], scores[q], rows[q], counts[q], sums,
        )  # fmt: skip
