"""Markdown tables of how the monitor does, from collected results alone."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.barometer.collected import Result
from benchmarks.barometer.judged import Judged, judge, poisson, wilson
from benchmarks.barometer.plan import KINDS, LOOKED_AT, SPENT
from benchmarks.grids.command_line import write_between

FIRST, LAST = "<!-- barometer: begin -->", "<!-- barometer: end -->"
SPLITS = ("held out", "looked at")
ENOUGH = 20
"""Runs of a kind that the plan asks for."""
AIM = 10
"""Steps of median lead that the plan asks for."""


def everything(results: Sequence[Result]) -> str:
    """Both splits; the held-out one first."""
    judged = [judge(result) for result in results]
    parts = []
    for split in SPLITS:
        mine = [j for j in judged if j.result.split == split]
        parts += [_head(split, mine), healthy_table(mine), falls_table(mine)] if mine else []
        parts += [lead] if (lead := leads_line(mine)) else []
    return "\n\n".join(parts) if parts else "No cell has been collected yet."


def write_page(results: Sequence[Result], page: Path) -> None:
    """Write the tables between the two marks of a page. Raises UserError where it has none."""
    write_between(page, FIRST, LAST, everything(results))


def _head(split: str, judged: Sequence[Judged]) -> str:
    seeds = sorted({j.result.header["seed"] for j in judged})
    starts = sorted({j.result.header["warm_start"] for j in judged})
    cpu = [s for j in judged if (s := j.result.header["cpu_seconds"]) is not None]
    cost = f", median {statistics.median(cpu):.0f} s of CPU per run" if cpu else ""
    runs = Counter(j.result.kind for j in judged)
    few = [name for name in KINDS if runs[name] < ENOUGH]
    which = "No kind has" if len(few) == len(KINDS) else f"{len(few)} of {len(KINDS)} kinds have less than"
    short = f" {which} {ENOUGH} runs: read the intervals." if few else ""
    return (
        f"**{split.capitalize()}**: {_many(len(judged), 'run')}, {_many(len(seeds), 'seed')} "
        f"({_listed(seeds)}), {_many(len(starts), 'warm start')}{cost}; {_history(seeds)}.{short}"
    )


def _history(seeds: Sequence[int]) -> str:
    """What these seeds have been used for."""
    said = []
    if mine := [seed for seed in seeds if seed in LOOKED_AT]:
        said.append((mine, "read while faults and metrics were made, so that they show fit"))
    if mine := [seed for seed in seeds if seed in SPENT]:
        change = "since then they led to one change, the second part of `reward_gap`"
        said.append((mine, f"held out when first judged; {change}"))
    if not said:
        return "no threshold, fault or metric was chosen by them"
    if len(said) == 1:
        return said[0][1]
    return "; ".join(f"{_listed(mine)}: {what}" for mine, what in said)


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _listed(seeds: Sequence[int]) -> str:
    return f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 2 else " and ".join(map(str, seeds))


def healthy_table(judged: Sequence[Judged]) -> str:
    """False alarms of whole healthy runs, and of the steps before a fault."""
    lines = [
        "| healthy steps | runs | steps | false alarms | per 1,000 steps (95 %) | rules |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    whole = [j for j in judged if KINDS[j.result.kind].kind == "healthy"]
    before = [j for j in judged if j not in whole and j.healthy_steps]
    rows = [(f"`{k}`", [j for j in whole if j.result.kind == k]) for k in KINDS]
    rows += [("before a fault", before), ("**all**", [*whole, *before])]
    for name, mine in rows:
        if not mine:
            continue
        steps = sum(j.healthy_steps for j in mine)
        alarms = [a for j in mine for a in j.false_alarms()]
        low, high = poisson(len(alarms))
        rate = f"{1000 * len(alarms) / steps:.1f} ({1000 * low / steps:.1f} to {1000 * high / steps:.1f})"
        rules = ", ".join(f"`{r}` {n}" for r, n in sorted(Counter(a.rule for a in alarms).items())) or "-"
        lines.append(f"| {name} | {len(mine)} | {steps:,} | {len(alarms)} | {rate} | {rules} |")
    return "\n".join(lines)


def falls_table(judged: Sequence[Judged]) -> str:
    """A row per kind that is wrong."""
    lines = [
        "| kind | what is wrong | runs | due | named (95 %) | any alarm | steps until named | reward fell | "
        "lead | first alarms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, kind in KINDS.items():
        mine = [j for j in judged if j.result.kind == name]
        if not mine or kind.kind == "healthy":
            continue
        lines.append(_fall_row(name, mine))
    return "\n".join(lines)


def leads_line(judged: Sequence[Judged]) -> str:
    """How to read a lead, and how many kinds have one that is late. Empty where no kind has a lead."""
    medians = [statistics.median(leads) for name in KINDS if (leads := _leads(name, judged))]
    if not medians:
        return ""
    late = sum(median < 0 for median in medians)
    aimed = sum(median >= AIM for median in medians)
    return (
        f"A negative lead: the alarm came after the fall. So the median is in {late} of the {len(medians)} "
        f"kinds with a lead. The plan's aim, a median lead of {AIM} steps, is "
        + ("missed in all of them." if not aimed else f"met in {aimed} of them.")
    )


def _leads(name: str, judged: Sequence[Judged]) -> list[int]:
    """Of the runs of a kind that were named and fell."""
    due = (j for j in judged if j.result.kind == name and j.counted)
    return [j.fell - a.step for j in due if (a := j.named()) and j.fell is not None]


def _fall_row(name: str, mine: Sequence[Judged]) -> str:
    kind = KINDS[name]
    due = [j for j in mine if j.counted]
    named = [(j, a) for j in due if (a := j.named())]
    any_of = [j for j in due if j.any_alarm()]
    low, high = wilson(len(named), len(due))
    begins = kind.begins if kind.kind == "injected" else 1
    waits = [a.step - begins for _, a in named]
    firsts = Counter(a.rule for j in due if (a := j.any_alarm()))
    cells = (
        f"`{name}`",
        kind.says,
        str(len(mine)),
        str(len(due)),
        f"{len(named)} of {len(due)} ({low:.2f} to {high:.2f})" if due else "-",
        f"{len(any_of)} of {len(due)}" if due else "-",
        _spread(waits),
        f"{sum(j.fell is not None for j in mine)} of {len(mine)}",
        _spread(_leads(name, mine)),
        ", ".join(f"`{rule}` {n}" for rule, n in firsts.most_common()) or "-",
    )
    return f"| {' | '.join(cells)} |"


def _spread(values: Sequence[int]) -> str:
    """Median and range."""
    if not values:
        return "-"
    return f"{statistics.median(values):g} ({min(values)} to {max(values)})"
