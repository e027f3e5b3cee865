"""The generated part of docs/study.md."""

from __future__ import annotations

from pathlib import Path

from benchmarks.collapse.arms import BASE, FAMILIES, SEEDS, STEPS
from benchmarks.collapse.findings import arms_there, paper_table, user_lines
from benchmarks.collapse.outcomes import PRIMARY, SECONDARY
from benchmarks.collapse.tables import (
    HEADS,
    Results,
    arms_table,
    complete,
    contrasts_table,
    first_batches,
    tested,
    verdict,
)
from benchmarks.grids.command_line import write_between

FIRST, LAST = "<!-- collapse study: begin -->", "<!-- collapse study: end -->"


def block(results: Results) -> str:
    """Everything with a number in it."""
    rollout, learner = BASE["rollout"], BASE["learner"]
    steps = learner["minibatches_per_batch"] * learner["epochs"]
    parts = [
        f"A run has {STEPS} steps of {rollout['prompts_per_step']} prompts x {rollout['group_size']} "
        f"samples, {steps} optimiser steps per batch, learning rate {learner['lr']:g} (the full rate); seeds "
        f"{SEEDS[0]} to {SEEDS[-1]}, paired. {arms_there(results)} {first_batches(results)}",
        "### The plan's outcome",
        verdict(results),
        "### For a user",
        "\n".join(user_lines(results)),
        "### The paper and these runs",
        "These rules are not of the plan, and are exploratory. *Fits*: in all runs, or intervals above 0. "
        "*Does not fit*: in at most half of the runs, or an interval below 0. "
        "The laboratory's model has half a million parameters; what does not fit here may hold elsewhere.",
        paper_table(results),
        "### Arms (means over their seeds)",
        arms_table(results) if any(results.values()) else "No run yet.",
    ]
    for family in FAMILIES:
        parts += _contrasts(results, family)
    return "\n\n".join(parts)


def _contrasts(results: Results, family: int) -> list[str]:
    name = ("PLAN.md", "PLAN_SECOND.md")[family - 1]
    head = f"### Contrasts of {name}"
    if not tested(results, PRIMARY, family):
        return [
            head,
            f"No two arms to compare are complete (complete: {', '.join(complete(results)) or '-'}).",
        ]
    return [
        head,
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
        cells = [
            f"{c.mean:+.3g} ({c.low:+.3g} to {c.high:+.3g}), p {c.adjusted:.2g}" if c.pairs else "-"
            for c in row
        ]
        lines.append(f"| {row[0].arm} - {row[0].control} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_page(results: Results, page: Path) -> None:
    """Write the block between the two marks of a page. Raises UserError where it has none."""
    write_between(page, FIRST, LAST, block(results))
