"""Dose and response of injected mismatch (PLAN_DOSE.md): effects per dose, and the rise of each along the
doses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.collapse_bench.causes import BEGINS, CURVE, DOSE_CURVE, DOSES, SECOND
from benchmarks.collapse_bench.collected import Result
from benchmarks.collapse_bench.effects import (
    PLAIN,
    Effect,
    Scores,
    effect,
    effects_table,
    names,
    scores_of,
    student,
)
from benchmarks.collapse_bench.plan import CURVE_CURES, FIRST_SEEDS

SIZES = dict(zip(DOSE_CURVE, (0.0, *DOSES), strict=True))
"""Noise on the sampler's weights, as a share of each tensor's own spread, by cause."""
SPAN = max(SIZES.values())


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the least-squares line through (x, y)."""
    x, y = (statistics.fmean(values) for values in zip(*points, strict=True))
    return math.fsum((a - x) * (b - y) for a, b in points) / math.fsum((a - x) ** 2 for a, _ in points)


def rise(scores: Scores, cure: str) -> Effect:
    """Slope x the largest dose of the cure's effect on the dose, over the seeds that have all doses; of plain
    GRPO: of its exact match."""
    found = []
    for seed in sorted({seed for _, _, seed in scores}):
        needed = [(cause, arm, seed) for cause in SIZES for arm in {cure, PLAIN}]
        if not all(cell in scores for cell in needed):
            continue
        points = []
        for cause, size in SIZES.items():
            other = 0.0 if cure == PLAIN else scores[cause, PLAIN, seed]
            points.append((size, scores[cause, cure, seed] - other))
        found.append(SPAN * slope(points))
    return student(found)


def measured(results: Sequence[Result], cause: str, metric: str) -> float | None:
    """Mean of a metric of plain GRPO over the steps after the one in which the noise begins."""
    means = []
    for result in results:
        if result.key[:2] == (cause, PLAIN):
            values = [row.get(metric) for row in result.rows if row["step"] > BEGINS]
            known = [value for value in values if value is not None and math.isfinite(value)]
            means += [statistics.fmean(known)] if known else []
    return statistics.fmean(means) if means else None


def doses_table(results: Sequence[Result], scores: Scores) -> str:
    """A row per dose: what was measured of it, plain GRPO, and the effect of the plan's cures."""
    cures = [cure for cure in CURVE_CURES if cure != PLAIN]
    heads = [
        "noise",
        "nats per token",
        "reward in training",
        "seeds",
        "`grpo`: EM",
        *(f"`{cure}`" for cure in cures),
    ]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for cause, size in SIZES.items():
        plain = [score for (c, cure, _), score in scores.items() if (c, cure) == (cause, PLAIN)]
        dose, reward = (measured(results, cause, key) for key in ("mismatch/abs_logp", "reward/mean"))
        row = [f"{size:g}", "-" if dose is None else f"{dose:.2g}"]
        row += ["-" if reward is None else f"{reward:.2f}", str(len(plain))]
        row.append(f"{statistics.fmean(plain):.2f}" if plain else "-")
        row += [str(effect(scores, (cause, cure), (cause, PLAIN))) for cure in cures]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def rises_lines(scores: Scores) -> str:
    """The plan's reading, a line per cure: plain GRPO first."""
    fall = rise(scores, PLAIN)
    lines = [f"- `{PLAIN}`: {_read_fall(fall)}"]
    for cure in CURVE_CURES:
        if cure != PLAIN:
            found = rise(scores, cure)
            end = _cures_mismatch(found, fall) if cure == "llds_a" else ""
            lines.append(f"- `{cure}`: {_read_rise(found)}{end}")
    return "\n".join(lines)


def _read_fall(found: Effect) -> str:
    if found.pairs < 2:
        return _too_few(found)
    if found.high < 0:
        said = "exact match falls with the dose"
    elif found.low > 0:
        said = "exact match rises with the dose"
    else:
        said = "exact match was not shown to change with the dose, so that there was nothing to cure"
    return f"{said}: {found}, {found.pairs} seeds."


def _read_rise(found: Effect) -> str:
    if found.pairs < 2:
        return _too_few(found)
    said = {
        "helps": "it helps more, the larger the dose",
        "harms": "it helps less, the larger the dose",
        "": "no change of its effect with the dose was shown",
    }[found.word]
    return f"{said}: {found}, {found.pairs} seeds."


def _cures_mismatch(found: Effect, fall: Effect) -> str:
    if found.pairs < 2:
        return ""
    shown = found.low > 0 and fall.high < 0
    return f" LLDS-A {'is a cure' if shown else 'was not shown to be a cure'} of mismatch here."


def _too_few(found: Effect) -> str:
    return f"not known yet: {found.pairs} of the seeds {'has' if found.pairs == 1 else 'have'} all six doses."


def dose_section(results: Sequence[Result]) -> str:
    """Of the page."""
    scores = scores_of(results)
    there = sum(result.key[0] in CURVE and result.key[1] in CURVE_CURES for result in results)
    planned = len(CURVE) * len(CURVE_CURES) * len(FIRST_SEEDS)
    parts = [
        f"{there} of the {planned} cells of `PLAN_DOSE.md` have run. *Noise* is on the sampler's weights, as "
        "a share of each tensor's own spread. *Nats per token* is the difference of sampler and learner "
        "that it makes under plain GRPO, *reward in training* the mean of its batches; both from step 14 on. "
        "A dose at which no answer is rewarded stops training: what is lost there is what would have been "
        "learned. Effects are as in the table above.",
        doses_table(results, scores),
        "The plan's reading: the least-squares line through the six doses of a seed, and its rise from dose "
        f"0 to {SPAN:g}; mean, Student's 95 % interval over seeds.",
        rises_lines(scores),
    ]
    others = {cause for cause, cure, _ in scores if cause in CURVE and cure not in CURVE_CURES}
    exact = [cause.name for cause in SECOND]
    if others or any(cause in exact for cause, _, _ in scores):
        parts.append(effects_table(scores, (*exact, *DOSE_CURVE)))
    else:
        parts.append(f"Not run: {names(exact)} (`PLAN_SECOND.md`), and added doses under the other cures.")
    return "\n\n".join(parts)
