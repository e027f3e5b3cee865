"""Made-up cells of the collapse study, as run folders."""

import json

from benchmarks.collapse.judged.outcomes import planned
from benchmarks.collapse.planned.cells import Cell
from benchmarks.collapse.running.grid import machine_file, warm_file


def made_up(
    folder,
    arm,
    seed,
    em,
    *,
    greedy=0.5,
    first_reward=0.5,
    searches=2.0,
    steps=150,
    extra=None,
    warm_start="",
    machine="",
):
    """A run folder as `unspiral train` leaves it. em: the sampled score from step 60 on; .5 before.
    warm_start, machine: what the grid notes of them."""
    cell = Cell(arm, seed, folder)
    cell.run.mkdir(parents=True, exist_ok=True)
    with open(cell.run / "metrics.jsonl", "w") as f:
        for step in range(1, steps + 1):
            row = {
                "step": step,
                "attempt": 0,
                "reward/mean": first_reward if step == 1 else 0.5,
                "grad_norm/max": 100.0 if step == 7 else 1.0,
                "probe/fixed": -0.1 if step < 100 else -0.3,
                "displacement/share_negative": 0.25,
                "entropy": 0.125,
                "rollout/searches": searches,
                "rollout/length": 20.0,
                "kl/old": 0.001,
                "logp/right": -0.123456789,
                "time/step": 1.5 + seed,
                "phase": "healthy",
            }
            f.write(json.dumps(row | (extra or {})) + "\n")
    with open(cell.run / "events.jsonl", "w") as f:
        f.write(json.dumps({"event": "alarm", "at_step": 3}) + "\n")
        for step in planned():
            for mode, value in (("greedy", greedy), ("sampled", em if step >= 60 else 0.5)):
                overall = {"em": value, "f1": value, "n": 500}
                f.write(
                    json.dumps({"event": "evaluation", "step": step, "mode": mode, "overall": overall}) + "\n"
                )
    summary = {"exit": 0, "steps": steps, "seconds": 200.0}
    (cell.run / "summary.json").write_text(json.dumps(summary))
    if warm_start:
        write(warm_file(folder, seed), {"sha256": warm_start, "path": "x"})
    if machine:
        write(machine_file(cell), {"machine": "x86_64", "processor": machine, "torch": "2.13.0"})
    return cell


def write(file, content):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
