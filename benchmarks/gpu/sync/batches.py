"""Batches for measurements of learner and sync without a rollout, and the spread of their results."""

from __future__ import annotations

import statistics

import numpy as np

from services.contracts import TrainBatch


def batch_of(rows: list[tuple[list[int], list[int]]], seed: int) -> TrainBatch:
    """Rows of a prompt and one action; advantages of either sign."""
    advantages = np.random.default_rng(seed).normal(size=len(rows)).astype(np.float32)
    return TrainBatch(
        [f"t{i}" for i in range(len(rows))],
        np.cumsum([0, *(len(prompt) + len(action) for prompt, action in rows)]),
        np.concatenate([np.asarray(prompt + action, np.int32) for prompt, action in rows]),
        np.concatenate([np.asarray([-1] * len(p) + [0] * len(a), np.int16) for p, a in rows]),
        advantages=advantages,
        preserved=advantages >= 0,
        valid=np.ones(len(rows), bool),
    )


def random_batch(rows: int, tokens: int, vocabulary: int, seed: int) -> TrainBatch:
    """Random ids; a prompt of an eighth, then one action."""
    ids = np.random.default_rng(seed).integers(3, vocabulary, (rows, tokens)).tolist()
    return batch_of([(row[: tokens // 8], row[tokens // 8 :]) for row in ids], seed)


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {
        name: statistics.median(values),
        f"{name}_min": min(values),
        f"{name}_max": max(values),
    }
