"""Where a run's time went: shares of a step, tokens per second, FLOP/s, and bytes per weight sync.

Everything is computed from `metrics.jsonl`, so a resumed run counts all its steps. The first step of a run
(compilation, first allocations) is left out where there are others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from services.common.counting import counted
from services.common.files import json_lines

if TYPE_CHECKING:
    from trainer.learner.results import RankInfo

PEAK_FLOPS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "GH200": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
}
"""Dense bfloat16 FLOP/s by the vendors' data sheets. The first name that stands in the device's as a word
counts: an L40 is no L4."""
PARTS = ("rollout", "update", "logprob", "sync", "other")


def performance(metrics: Sequence[dict[str, Any]], ranks: Sequence[RankInfo] = ()) -> dict[str, Any]:
    """Means over the steps of a run, as `summary.json` holds them. metrics: one dict per step. ranks:
    `LearnerGroup.where`.

    `share/*`: of the step's wall time; `rollout` is the time that the learner waited for scored trajectories,
    `update` includes scoring pi_old, `logprob` is the scoring after it, `sync` ends when all workers serve
    again, `other` is the rest: files, store, monitor. `overhead`: `other` and the part of `update`
    in which no rank computed, which is what Ray, services and driver cost around a step.
    `learner/flops_per_s`: of all ranks, during updates, 6 per parameter and token (4 with LoRA), 2 for
    scoring pi_old. The output layer's parameters (tied or not) count for action tokens, the others' for
    all; the input embedding and attention's own products are left out. `learner/mfu`: over the devices'
    peak, in bfloat16 where it is known.
    """
    steps = [m for m in metrics if m.get("time/step")]
    steps = steps[1:] if len(steps) > 1 else steps
    if not steps:
        return {}

    def total(key: str, default: float = 0.0) -> float:
        return sum(m.get(key) or default for m in steps)

    wall = total("time/step")
    spent = {
        "rollout": sum(m.get("time/rollout_wait", m.get("time/rollout")) or 0.0 for m in steps),
        "update": total("time/update"),
        "logprob": total("time/logprob"),
        "sync": total("time/sync"),
    }
    spent["other"] = max(0.0, wall - sum(spent.values()))
    out: dict[str, Any] = {"steps": len(steps), "seconds_per_step": wall / len(steps)}
    out |= {f"share/{name}": spent[name] / wall for name in PARTS}
    if computed := total("time/update_compute"):
        out["overhead"] = (spent["other"] + max(0.0, spent["update"] - computed)) / wall
    if sampling := total("time/rollout"):
        written = sum((m.get("rollout/tokens_per_s") or 0.0) * (m.get("time/rollout") or 0.0) for m in steps)
        out["rollout/tokens_per_s"] = written / sampling
    if spent["update"]:
        out["learner/tokens_per_s"] = total("learner/tokens") / spent["update"]
    if spent["update"] and ranks:
        trained = (total("learner/tokens"), total("learner/action_tokens"))
        scored = (total("learner/scored_tokens"), total("learner/scored_action_tokens"))
        out |= _flops(ranks, trained, scored, spent["update"])
    if nbytes := total("sync/bytes"):
        out["sync/bytes"] = nbytes / len(steps)
        out["sync/seconds"] = spent["sync"] / len(steps)
    return out


def _flops(
    ranks: Sequence[RankInfo], trained: tuple[float, float], scored: tuple[float, float], seconds: float
) -> dict[str, float]:
    """trained, scored: tokens, and action tokens."""
    about = ranks[0]
    backward = 2 if about.lora else 4
    work = zip((about.parameters, about.head_parameters), trained, scored, strict=True)
    rate = sum(parameters * ((2 + backward) * t + 2 * s) for parameters, t, s in work) / seconds
    out = {"learner/flops_per_s": rate}
    peak = next(
        (flops for name, flops in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", about.device_name)), None
    )
    if peak and about.dtype == "bfloat16":
        out["learner/mfu"] = rate / (peak * len(ranks))
    return out


def of_run(metrics_file: Path, ranks: Sequence[RankInfo] = ()) -> dict[str, Any]:
    """The performance of a run's `metrics.jsonl`; empty without one."""
    if not metrics_file.is_file():
        return {}
    return performance(json_lines(metrics_file), ranks)


def rendered(numbers: dict[str, Any]) -> Table:
    """What the terminal shows at the end of a run."""
    out = Table(
        title=f"where the time went ({counted(numbers['steps'], 'step')})",
        title_justify="left",
        box=None,
        show_header=False,
    )
    out.add_column("what")
    out.add_column("figure", justify="right")
    out.add_row("seconds per step", f"{numbers['seconds_per_step']:.2f}")
    for name in PARTS:
        out.add_row(f"  {name}", f"{numbers[f'share/{name}']:.1%}")
    for key, what, form in (
        ("overhead", "Ray, services, driver", "{:.1%}"),
        ("rollout/tokens_per_s", "rollout tokens/s", "{:,.0f}"),
        ("learner/tokens_per_s", "learner tokens/s", "{:,.0f}"),
        ("learner/flops_per_s", "learner FLOP/s", "{:.3g}"),
        ("learner/mfu", "model FLOP utilisation", "{:.1%}"),
        ("sync/bytes", "bytes a sync", "{:,.0f}"),
        ("sync/seconds", "seconds a sync", "{:.3f}"),
    ):
        if key in numbers:
            out.add_row(what, form.format(numbers[key]))
    return out
