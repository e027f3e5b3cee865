"""Metric curves as dense chunks: one float64 a step, NaN where a step has no value. Both stores keep them in
this form.

A chunk holds CHUNK steps of one metric, so a curve of 10^5 steps is 200 small blobs, read in a few
milliseconds and thinned here before it leaves the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

CHUNK = 512


def place(step: int) -> tuple[int, int]:
    """(chunk, position in it) of a step."""
    return divmod(step, CHUNK)


def patched(chunk: bytes | None, position: int, value: float | None) -> bytes:
    """The chunk with one value set; None clears it."""
    array = np.full(CHUNK, np.nan) if chunk is None else np.frombuffer(chunk, np.float64).copy()
    array[position] = np.nan if value is None else value
    return array.tobytes()


def cleared(chunk: bytes, positions: list[int]) -> bytes:
    """The chunk without the values at these positions."""
    array = np.frombuffer(chunk, np.float64).copy()
    array[positions] = np.nan
    return array.tobytes()


def dense(chunks: Iterable[tuple[int, bytes]], first: int, last: int) -> np.ndarray:
    """float64 [last - first + 1] out of (chunk number, bytes), NaN where nothing is stored."""
    out = np.full(max(0, last - first + 1), np.nan)
    for number, blob in chunks:
        values = np.frombuffer(blob, np.float64)
        begin = number * CHUNK
        low, high = max(first, begin), min(last + 1, begin + CHUNK)
        if low < high:
            out[low - first : high - first] = values[low - begin : high - begin]
    return out


def stored(chunks: Sequence[tuple[int, bytes]], first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps (int64) and values (float64) out of (chunk number, bytes) in order, where there is a value."""
    if not chunks:
        return np.zeros(0, np.int64), np.zeros(0)
    values = np.concatenate([np.frombuffer(blob, np.float64) for _, blob in chunks])
    numbers = np.array([number for number, _ in chunks], np.int64)
    lengths = [len(blob) // 8 for _, blob in chunks]
    inside = np.arange(len(values)) - np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    steps = np.repeat(numbers * CHUNK, lengths) + inside
    keep = ~np.isnan(values) & (steps >= first) & (steps <= last)
    return steps[keep], values[keep]


def thinned(columns: Mapping[str, np.ndarray], first: int, points: int) -> dict:
    """`thinned_curves` of columns [N] with NaN where a step has no value; the first belongs to step
    `first`."""
    size = max((len(c) for c in columns.values()), default=0)
    curves = ((n, (first + np.flatnonzero(~np.isnan(c)), c[~np.isnan(c)])) for n, c in columns.items())
    return thinned_curves(curves, first, first + size - 1, points)


def thinned_curves(
    curves: Iterable[tuple[str, tuple[np.ndarray, np.ndarray]]], first: int, last: int, points: int
) -> dict:
    """At most `points` points per curve: the mean, least and largest value of each bucket of `stride` steps.

    curves: (name, (steps [N] rising, values [N] without NaN)), read one after the other; those without a
    value are left out. Buckets start at multiples of the stride, so that a curve that grows keeps its points;
    buckets in which no curve has a value are left out. Lists hold None for "no value".
    """
    stride = max(1, -(-(last - first + 1) // max(1, points - 1)))
    base = first // stride
    found: dict[str, tuple[np.ndarray, list[np.ndarray]]] = {}
    taken = np.zeros(0, np.int64)
    for name, (steps, values) in curves:
        if len(steps):
            bucket = steps // stride - base
            starts = np.flatnonzero(np.diff(bucket, prepend=-1))
            buckets = bucket[starts]
            counts = np.diff(starts, append=len(bucket))
            stats = [np.add.reduceat(values, starts) / counts]
            if stride > 1:
                stats += [np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)]
            found[name] = buckets, stats
            taken = np.union1d(taken, buckets)
    series = {}
    for name, (buckets, stats) in found.items():
        at = np.searchsorted(taken, buckets)
        lists = []
        for values in stats:
            column = np.full(len(taken), np.nan)
            column[at] = values
            lists.append(listed(column))
        series[name] = dict(zip(("mean", "min", "max"), lists, strict=False))
    steps = np.maximum((taken + base) * stride, first)
    return {"step": steps.tolist(), "stride": stride if found else 1, "series": series}


def listed(values: np.ndarray) -> list[float | None]:
    """JSON-ready: seven significant digits are more than a curve shows."""
    rounded = [None if v != v else float(f"{v:.7g}") for v in values.tolist()]
    return rounded


def bands(codes: np.ndarray, first: int, names: list[str]) -> list[dict]:
    """Runs of equal phase codes as `{"phase", "first", "last"}`, steps without a code bridged."""
    at = np.flatnonzero(~np.isnan(codes))
    if not len(at):
        return []
    values = codes[at].astype(int)
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    ends = [*(starts[1:] - 1), len(at) - 1]
    return [
        {"phase": names[values[s]], "first": int(first + at[s]), "last": int(first + at[e])}
        for s, e in zip(starts, ends, strict=True)
    ]
