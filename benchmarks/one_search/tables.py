"""The section of docs/study.md, from collected results alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.collapse_bench.effects import Effect, student
from benchmarks.one_search.cells import Result
from benchmarks.one_search.plan import ARMS, CONTRASTS, LAST, SAYS, SEEDS, STEPS

FIRST, END = "<!-- one search: begin -->", "<!-- one search: end -->"


def block(results: Sequence[Result]) -> str:
    """Everything with a number in it."""
    if not results:
        return "Not run yet."
    made = {result.key: result for result in results}
    seeds = sorted({seed for _, seed in made})
    there = [seed for seed in seeds if all((arm, seed) in made for arm in ARMS)]
    seconds = statistics.median(result.header["cpu_seconds"] for result in results)
    processors = sorted({result.header["versions"]["processor"] for result in results})
    return "\n".join(
        [
            f"{len(results)} runs of {STEPS} steps, median {seconds:.0f} s of CPU each "
            f"({', '.join(processors)}); seeds with all arms: {', '.join(map(str, there)) or 'none'} (the "
            f"plan has {SEEDS[0]} to {SEEDS[-1]}). "
            f"Searches are per trajectory, at the end in the mean of the last {LAST} steps. Exact match is "
            "sampled, on held-out questions of two hops. The contrasts are of the mean of all steps, with "
            "Student's 95 % interval.",
            "",
            _arms(made),
            "",
            *(_contrast(made, *pair) for pair in CONTRASTS),
        ]
    )


def _arms(made: dict[tuple[str, int], Result]) -> str:
    lines = [
        "| arm |  | seeds | searches, first batch | at the end | all steps | weight of the answer, mean "
        "| EM of two hops, before | at the end |",
        "| --- " * 9 + "|",
    ]
    for arm in ARMS:
        mine = [result for (of, _), result in made.items() if of == arm]
        if not mine:
            lines.append(f"| `{arm}` | {SAYS[arm]} | 0 |{' - |' * 6}")
            continue
        searches = [statistics.fmean(values) for values in zip(*(r.searches() for r in mine), strict=True)]
        weights = [weight for r in mine if (weight := r.weight()) is not None]
        weight = f"{statistics.fmean(weights):.2f}" if weights else "-"
        before, after = (statistics.fmean(r.two_hop[step] for r in mine) for step in (0, STEPS))
        lines.append(
            f"| `{arm}` | {SAYS[arm]} | {len(mine)} | {' | '.join(f'{mean:.2f}' for mean in searches)} "
            f"| {weight} | {before:.2f} | {after:.2f} |"
        )
    return "\n".join(lines)


def _contrast(made: dict[tuple[str, int], Result], arm: str, control: str) -> str:
    """A line by rule: the difference of searches in the mean of all steps, paired by seed."""
    seeds = [seed for of, seed in made if of == arm and (control, seed) in made]
    pairs = [(made[arm, seed], made[control, seed]) for seed in seeds]
    found = student([a.searches()[-1] - b.searches()[-1] for a, b in pairs])
    if found.pairs < 2:
        return f"- `{arm}` minus `{control}`: not known yet."
    return f"- `{arm}` minus `{control}`: {_word(found)}: {found}, {found.pairs} seeds."


def _word(found: Effect) -> str:
    return {"helps": "more searches", "harms": "fewer searches", "": "no difference of searches was shown"}[
        found.word
    ]
