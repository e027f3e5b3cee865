"""Markdown tables and the verdict of the study, from collected results alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.collapse.judged.collected import Results
from benchmarks.collapse.judged.outcomes import END, PRIMARY, SECONDARY, Outcomes
from benchmarks.collapse.judged.sameness import NOTHING_CONCLUDED, faults, first_batches, mixed
from benchmarks.collapse.judged.statistics import holm, interval, permutation_p
from benchmarks.collapse.planned.arms import ARMS, CLAIM, SEEDS, contrasts

HEADS = {
    "em": "EM sampled, steps 60 to 150",
    "time_to_half": "steps until reward under half",
    "em_greedy_end": "EM greedy, end",
    "fall": "EM sampled, best minus end",
    "grad_norm": "largest gradient norm, log10",
    "probe_fall": "fixed probe, fall, nats per token",
    "share_falling": "preserved that fell",
    "entropy": "entropy",
    "searches": "searches",
}


@dataclass(frozen=True)
class Contrast:
    """Arm minus control for one outcome. p and interval are NaN where there are too few pairs."""

    arm: str
    control: str
    pairs: int
    mean: float
    low: float
    high: float
    p: float
    adjusted: float = math.nan


def complete(results: Results) -> tuple[str, ...]:
    """Arms with every seed of the plan, in its order: no other arm is tested."""
    return tuple(name for name in ARMS if set(SEEDS) <= set(results.get(name, {})))


def paired(results: Results, arm: str, control: str, outcome: str, seeds: Sequence[int] = SEEDS) -> Contrast:
    """Over those of the seeds (the plan's) for which both arms have the outcome."""
    differences = []
    for seed in seeds:
        mine, other = results[arm].get(seed), results[control].get(seed)
        if mine is None or other is None:
            continue
        a, b = getattr(mine.outcomes(), outcome), getattr(other.outcomes(), outcome)
        if a is not None and b is not None:
            differences.append(a - b)
    mean = statistics.fmean(differences) if differences else math.nan
    low, high = interval(differences)
    return Contrast(arm, control, len(differences), mean, low, high, permutation_p(differences))


def tested(results: Results, outcome: str, family: int = 1) -> list[Contrast]:
    """All contrasts of a family between complete arms, with Holm's adjustment over them."""
    found = [paired(results, *pair, outcome) for pair in contrasts(complete(results), family)]
    adjusted = holm({(c.arm, c.control): c.p for c in found})
    return [
        Contrast(c.arm, c.control, c.pairs, c.mean, c.low, c.high, c.p, adjusted[c.arm, c.control])
        for c in found
    ]


def runs_table(results: Results) -> str:
    """A row per cell."""
    columns = (HEADS[key] for key in (PRIMARY, *SECONDARY))
    lines = _head("arm", "seed", *columns, "steps without a finite norm")
    for arm in ARMS:
        for seed, result in sorted(results.get(arm, {}).items()):
            found = result.outcomes()
            cells = [_number(getattr(found, key)) for key in (PRIMARY, *SECONDARY)]
            if not found.collapsed:
                cells[1] = f"> {END}"
            lines.append(_row(arm, str(seed), *cells, str(found.nonfinite_steps)))
    return "\n".join(lines)


def arms_table(results: Results) -> str:
    """A row per arm: means over its seeds."""
    lines = _head("arm", "", "seeds", "collapsed", *(HEADS[key] for key in (PRIMARY, *SECONDARY)))
    for arm in ARMS:
        if not (mine := results.get(arm)):
            continue
        found = [result.outcomes() for result in mine.values()]
        lines.append(
            _row(
                arm,
                ARMS[arm].says,
                str(len(found)),
                str(sum(o.collapsed for o in found)),
                *(_mean(found, key) for key in (PRIMARY, *SECONDARY)),
            )
        )
    return "\n".join(lines)


def contrasts_table(results: Results, outcome: str = PRIMARY, family: int = 1) -> str:
    """A row per contrast of one outcome, of one family."""
    lines = _head("arm", "minus", "pairs", f"{HEADS[outcome]}: mean difference", "95 % BCa", "p", "p, Holm")
    for c in tested(results, outcome, family):
        lines.append(
            _row(
                c.arm,
                c.control,
                str(c.pairs),
                f"{c.mean:+.3f}",
                f"{c.low:+.3f} to {c.high:+.3f}",
                p_text(c.p),
                p_text(c.adjusted),
            )
        )
    return "\n".join(lines)


def verdict(results: Results) -> str:
    """The plan's rule: the claim is refuted unless both intervals lie above 0. A sentence for each contrast,
    then the word."""
    needed = {arm for pair in CLAIM for arm in pair}
    if missing := [arm for arm in ARMS if arm in needed - set(complete(results))]:
        return f"Undecided: not all ten seeds of {', '.join(missing)} are there."
    if odd := faults(results, needed):
        return f"Undecided: {'; '.join(odd)}. {NOTHING_CONCLUDED}"
    found = [paired(results, arm, control, PRIMARY) for arm, control in CLAIM]
    if any(c.pairs < len(SEEDS) for c in found):
        return "Undecided: the primary outcome is missing for some seeds."
    said = [
        f"{c.arm} minus {c.control}: {c.mean:+.3f}, 95 % interval {c.low:+.3f} to {c.high:+.3f}, "
        f"raw p {p_text(c.p)}."
        for c in found
    ]
    against = [f"{c.arm} minus {c.control}" for c in found if not c.low > 0]
    end = (
        f"Refuted: the interval of {' and of '.join(against)} does not lie above 0."
        if against
        else "Not refuted."
    )
    return " ".join([*said, end]) + mixed(results, needed)


def second_family(results: Results) -> list[str]:
    """The contrasts of PLAN_SECOND.md, once one of its arms is complete."""
    if not contrasts(complete(results), 2):
        return []
    return [
        "## Second family (PLAN_SECOND.md)",
        *(contrasts_table(results, key, 2) for key in (PRIMARY, *SECONDARY)),
    ]


def other_seeds(results: Results) -> list[str]:
    """The contrasts over seeds that are not of the plan, where two arms share some."""
    lines = _head("arm", "minus", "pairs", f"{HEADS[PRIMARY]}: mean difference", "95 % BCa", "p")
    rows = []
    for arm, control in (*contrasts(), *contrasts(family=2)):
        seeds = sorted(results.get(arm, {}).keys() & results.get(control, {}).keys() - set(SEEDS))
        c = paired(results, arm, control, PRIMARY, seeds) if seeds else None
        if c is not None and c.pairs:
            span = "-" if math.isnan(c.low) else f"{c.low:+.3f} to {c.high:+.3f}"
            rows.append(_row(arm, control, str(c.pairs), f"{c.mean:+.3f}", span, p_text(c.p)))
    if not rows:
        return []
    said = "No verdict is drawn from these, and nothing corrects for their number."
    return ["## Seeds outside the plan", said, "\n".join([*lines, *rows])]


def everything(results: Results) -> str:
    """The whole page."""
    parts = [
        "## Verdict",
        verdict(results),
        first_batches(results),
        "## Primary outcome",
        contrasts_table(results),
        "## Arms (means over seeds)",
        arms_table(results),
        "## Secondary outcomes",
        *(contrasts_table(results, key) for key in SECONDARY),
        *second_family(results),
        *other_seeds(results),
        "## Runs",
        runs_table(results),
    ]
    return "\n\n".join(parts) + "\n"


def _mean(found: list[Outcomes], key: str) -> str:
    values = [value for o in found if (value := getattr(o, key)) is not None]
    return _number(statistics.fmean(values)) if values else "-"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 else f"{value:.3f}"


def p_text(value: float) -> str:
    """A p value, to two digits."""
    return "-" if math.isnan(value) else f"{value:.4f}" if value < 0.01 else f"{value:.2f}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _head(*names: str) -> list[str]:
    return [_row(*names), "| --- " * len(names) + "|"]
