"""The table of the real model's runs in docs/monitor_evidence.md: when the likelihood alarm came, and when
the reward fell. `python -m benchmarks.real_model.alarms docs/monitor_evidence.md` writes it into the page."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.barometer.judged import WIDTH, fell
from benchmarks.grids.command_line import write_between
from benchmarks.real_model.training import FIRST_LOTS, HALF_RATE, SEEDS, metrics, run_label, runs
from services.likelihood.monitor.phases import PhaseMonitor

FIRST, LAST = "<!-- real runs: begin -->", "<!-- real runs: end -->"
MADE_FROM = tuple(f"grpo_lr1e-5_s{seed}" for seed in SEEDS)
"""Runs that `plunge_nats` was made from, so that their leads show fit."""


@dataclass(frozen=True)
class Alarmed:
    """One run under the monitor's defaults of today. Steps count from 1."""

    name: str
    label: str
    likelihood: tuple[int, ...]
    """Steps of the alarms of the rule `likelihood`."""
    fell: int | None
    """First of three steps running whose mean reward of 8 is under .85 of its best."""
    kept: float
    """Mean reward of the last 8 steps, as a share of the best such mean."""

    @property
    def lead(self) -> int | None:
        """Steps from the first alarm to the fall of the reward; negative: the alarm came after it."""
        return self.fell - self.likelihood[0] if self.likelihood and self.fell is not None else None


def alarmed() -> list[Alarmed]:
    """All committed runs of the real model."""
    found = []
    for file in (FIRST_LOTS, HALF_RATE):
        for name, run in runs(file).items():
            rows = metrics(name)
            monitor = PhaseMonitor()
            alarms = [a for row in rows for a in monitor.update(row).alarms]
            rewards = [row["reward/mean"] for row in rows]
            means = [statistics.fmean(rewards[i - WIDTH : i]) for i in range(WIDTH, len(rewards) + 1)]
            label = run_label(run) + (" (again)" if name.endswith("_again") else "")
            steps = tuple(a.step for a in alarms if a.rule == "likelihood")
            found.append(Alarmed(name, label, steps, fell(rewards), means[-1] / max(means)))
    return found


def block() -> str:
    """Markdown: a row per run, and what the leads come to."""
    found = alarmed()
    lines = [
        "| recorded run (benchmarks/results/wiki_qa_0.5b) | likelihood alarms at step | reward fell | lead "
        "| reward at the end, share of its best |",
        "| --- " * 5 + "|",
    ]
    for one in found:
        star = " *" if one.name in MADE_FROM else ""
        steps = "; ".join(map(str, one.likelihood)) or "none"
        lines.append(f"| 0.5B, {one.label}{star} | {steps} | {_fell(one)} | {_lead(one)} | {one.kept:.2f} |")
    fallen = sum(one.fell is not None for one in found)
    fit = [one.lead for one in found if one.name in MADE_FROM]
    others = [one.lead for one in found if one.name not in MADE_FROM and one.lead is not None]
    late = sum(lead < 0 for lead in others)
    said = (
        f"*: `plunge_nats` (below) was made from these three, whose leads of {_listed(fit)} show fit. In the "
        f"{len(others)} other runs with an alarm the leads are {_listed(others)}: {late} of {len(others)} "
        f"came after the fall. By this definition the reward fell in {fallen} of {len(found)} runs, also in "
        "those that stand at the end: a lead to it is no lead to a collapse."
    )
    return "\n".join(lines) + f"\n\n{said}"


def _fell(one: Alarmed) -> str:
    return "never" if one.fell is None else str(one.fell)


def _lead(one: Alarmed) -> str:
    if one.lead is None:
        return "-"
    return f"{one.lead}: late" if one.lead < 0 else str(one.lead)


def _listed(leads: list[int | None] | list[int]) -> str:
    *most, last = map(str, leads)
    return f"{', '.join(most)} and {last}" if most else last


if __name__ == "__main__":
    write_between(Path(sys.argv[1]), FIRST, LAST, block())
