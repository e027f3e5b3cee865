"""The result of an evaluation: its scores by set, averages and intervals, with the protocol they came by."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from trainer.suite.rows import GREEDY, METRICS, Row
from trainer.suite.sets import SETS, Suite
from trainer.suite.statistics import LEVEL, RESAMPLES, Estimates, pass_at_k

FORMAT = 1
RESULT_FILE = "result.json"
RATES = ("searches", "answered")
"""Of each set, beside its scores: mean number of searches, and share of rows with an answer."""


def powers_up_to(samples: int) -> list[int]:
    """The k of pass@k: 2, 4, 8, ... and the number of samples. pass@1 is the sampled mean."""
    return sorted(({1 << i for i in range(samples.bit_length())} | {samples}) - {0, 1})


def result_of(suite: Suite, rows: list[Row], samples: int, about: dict[str, Any]) -> dict[str, Any]:
    """The content of `result.json`. rows: all that were planned; about: method, model and protocol."""
    greedy = _by_set([row for row in rows if row["sample"] == GREEDY])
    result = {
        "format": FORMAT,
        **about,
        "interval": {
            "level": LEVEL,
            "resamples": RESAMPLES,
            "method": "percentile bootstrap within each set",
        },
        "sets": {one.name: one.describe() for one in suite.sets},
        "missing_sets": suite.missing,
        **scores_of(greedy),
    }
    if samples:
        result["sampled"] = {"samples": samples} | _sampled(
            _by_set([row for row in rows if row["sample"] != GREEDY]), samples
        )
    return result


def scores_of(by_set: dict[str, list[Row]]) -> dict[str, Any]:
    """`sources`: metrics and rates of each set; `averages`: metrics of each average. Each is `{"mean", "low",
    "high"}`, each rate a number."""
    columns = {
        name: np.array([[row["scores"][metric] for metric in METRICS] for row in rows], float)
        for name, rows in by_set.items()
    }
    estimates = Estimates(columns)
    sources = {
        name: {"n": len(rows)}
        | {metric: estimates.of_set(name, at) for at, metric in enumerate(METRICS)}
        | _rates(rows)
        for name, rows in by_set.items()
    }
    averages: dict[str, dict[str, Any]] = defaultdict(dict)
    for at, metric in enumerate(METRICS):
        for name, estimate in estimates.averages(at).items():
            averages[name][metric] = estimate
    return {"n": sum(map(len, by_set.values())), "sources": sources, "averages": dict(averages)}


def _rates(rows: list[Row]) -> dict[str, float]:
    return {
        "searches": sum(len(row["searches"]) for row in rows) / len(rows),
        "answered": sum(row["answer"] is not None for row in rows) / len(rows),
    }


def _by_set(rows: list[Row]) -> dict[str, list[Row]]:
    """In the order of SETS."""
    found: dict[str, list[Row]] = {name: [] for name in SETS}
    for row in rows:
        found[row["set"]].append(row)
    return {name: some for name, some in found.items() if some}


def _sampled(by_set: dict[str, list[Row]], samples: int) -> dict[str, Any]:
    """Sampled mean of EM, and pass@k by EM, each over questions: `{name: {"sources": ..., "averages":
    ...}}`."""
    ks = powers_up_to(samples)
    columns = {name: _of_questions(rows, samples, ks) for name, rows in by_set.items()}
    estimates = Estimates(columns)
    return {
        title: {
            "sources": {name: estimates.of_set(name, at) for name in columns},
            "averages": estimates.averages(at),
        }
        for at, title in enumerate(["mean", *(f"pass@{k}" for k in ks)])
    }


def _of_questions(rows: list[Row], samples: int, ks: list[int]) -> np.ndarray:
    """[questions, 1 + len(ks)]: mean EM, and each pass@k."""
    right: dict[str, int] = defaultdict(int)
    for row in rows:
        right[row["key"]] += row["scores"]["em"] == 1
    return np.array([[c / samples, *(pass_at_k(samples, c, k) for k in ks)] for c in right.values()], float)
