"""The generated part of docs/study.md."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.collapse.judged.collected import Results
from benchmarks.collapse.judged.findings import arms_there, in_short, paper_table, user_lines
from benchmarks.collapse.judged.outcomes import PRIMARY, SECONDARY
from benchmarks.collapse.judged.sameness import first_batches, machines, repeats_table
from benchmarks.collapse.judged.tables import (
    HEADS,
    Contrast,
    arms_table,
    complete,
    contrasts_table,
    tested,
    verdict,
)
from benchmarks.collapse.planned.arms import BASE, FAMILIES, SEEDS, STEPS
from benchmarks.grids.command_line import write_between

FIRST, LAST = "<!-- collapse study: begin -->", "<!-- collapse study: end -->"
SHORT = "<!-- collapse study in short: begin -->", "<!-- collapse study in short: end -->"
"""Marks of the two sentences at the top of the page, where it has them."""


def block(results: Results, repeats: Results | None = None) -> str:
    """Everything with a number in it. repeats: cells that were run a second time."""
    rollout, learner = BASE["rollout"], BASE["learner"]
    steps = learner["minibatches_per_batch"] * learner["epochs"]
    parts = [
        f"A run has {STEPS} steps of {rollout['prompts_per_step']} prompts x {rollout['group_size']} "
        f"samples, {steps} optimiser steps per batch, learning rate {learner['lr']:g} (the full rate); seeds "
        f"{SEEDS[0]} to {SEEDS[-1]}, paired.",
        arms_there(results),
        f"{first_batches(results)} {machines(results)}".strip(),
        "### The plan's outcome",
        verdict(results),
        "### For a user",
        "A line says *raised* or *lowered* where the 95 % interval lies off 0; its p is corrected over the "
        "contrasts of PLAN.md whose arms are complete.",
        "\n".join(user_lines(results)),
        "### The paper and these runs",
        "These rules are not of the plan, and are exploratory. *Fits*: in all runs, or intervals above 0. "
        "*Does not fit*: in at most half of the runs, or an interval below 0. "
        f"The laboratory's model has half a million parameters, and its runs have {STEPS} steps; what does "
        "not fit here may hold elsewhere, or later.",
        paper_table(results),
        "### Arms (means over their seeds)",
        arms_table(results) if any(results.values()) else "No run yet.",
        "### The same cell twice",
        repeats_table(results, repeats or {}),
    ]
    for family in FAMILIES:
        parts += _contrasts(results, family)
    return "\n\n".join(part for part in parts if part)


def _contrasts(results: Results, family: int) -> list[str]:
    name = ("PLAN.md", "PLAN_SECOND.md")[family - 1]
    head = f"### Contrasts of {name}"
    if not tested(results, PRIMARY, family):
        return [
            head,
            f"None yet: no arm of this family is complete together with its control "
            f"(complete: {', '.join(complete(results)) or '-'}).",
        ]
    return [
        head,
        f"Holm's procedure over {len(tested(results, PRIMARY, family))} contrasts, those whose arms have all "
        f"{len(SEEDS)} seeds.",
        contrasts_table(results, PRIMARY, family),
        "Secondary outcomes, exploratory: mean difference, 95 % BCa interval, p by Holm.",
        secondary_table(results, family),
    ]


def secondary_table(results: Results, family: int) -> str:
    """A row per contrast, a column per secondary outcome."""
    lines = [
        f"| contrast | {' | '.join(HEADS[key] for key in SECONDARY)} |",
        "| --- " * (1 + len(SECONDARY)) + "|",
    ]
    columns = [tested(results, key, family) for key in SECONDARY]
    for row in zip(*columns, strict=True):
        cells = [_secondary(c) for c in row]
        lines.append(f"| {row[0].arm} - {row[0].control} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _secondary(c: Contrast) -> str:
    """A missing value leaves its seed out: the number of pairs is said where it is not that of the plan."""
    if not c.pairs:
        return "-"
    span = "" if math.isnan(c.low) else f" ({c.low:+.3g} to {c.high:+.3g})"
    left = "" if c.pairs == len(SEEDS) else f", {c.pairs} pairs"
    return f"{c.mean:+.3g}{span}, p {c.adjusted:.2g}{left}"


def write_page(results: Results, page: Path, repeats: Results | None = None) -> None:
    """Write the block between the two marks of a page, and the sentences at its top. Raises UserError where
    it has no marks."""
    write_between(page, FIRST, LAST, block(results, repeats))
    if SHORT[0] in page.read_text(encoding="utf-8"):
        write_between(page, *SHORT, in_short(results))
