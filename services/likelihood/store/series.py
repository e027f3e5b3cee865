"""Metric curves as dense chunks: one float64 a step, NaN where a step has no value. Both stores keep them in this form.

A chunk holds CHUNK steps of one metric, so a curve of 10^5 steps is 200 small blobs, read in a few milliseconds and thinned
here before it leaves the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


def thinned(columns: Mapping[str, np.ndarray], first: int, points: int) -> dict:
    """At most `points` points a curve: the mean, least and largest value of each bucket of `stride` steps.

    Buckets start at multiples of the stride, so that a curve that grows keeps its points. Columns are [N], the first belongs
    to step `first`; buckets in which no column has a value are left out. Lists hold None for "no value".
    """
    size = max((len(c) for c in columns.values()), default=0)
    stride = max(1, -(-size // max(1, points - 1)))
    if stride == 1:
        keep = np.zeros(size, bool)
        for column in columns.values():
            keep |= ~np.isnan(column)
        steps = first + np.flatnonzero(keep)
        series = {name: {"mean": listed(column[keep])} for name, column in columns.items()}
        return {"step": steps.tolist(), "stride": 1, "series": series}
    pad_left = first % stride
    buckets = -(-(pad_left + size) // stride)
    keep, stats = np.zeros(buckets, bool), {}
    for name, column in columns.items():
        table = np.full(buckets * stride, np.nan)
        table[pad_left : pad_left + size] = column
        table = table.reshape(buckets, stride)
        missing = np.isnan(table)
        count = stride - missing.sum(1)
        some = count > 0
        mean = np.where(some, np.where(missing, 0.0, table).sum(1) / np.maximum(count, 1), np.nan)
        low = np.where(some, np.where(missing, np.inf, table).min(1), np.nan)
        high = np.where(some, np.where(missing, -np.inf, table).max(1), np.nan)
        keep |= some
        stats[name] = (mean, low, high)
    steps = first - pad_left + stride * np.flatnonzero(keep)
    series = {
        name: {key: listed(values[keep]) for key, values in zip(("mean", "min", "max"), three, strict=True)}
        for name, three in stats.items()
    }
    return {"step": np.maximum(steps, first).tolist(), "stride": stride, "series": series}


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
