"""Asynchronous training against on-policy training at equal time: the same model, data and cards, so many
minutes each, with `rollout.max_staleness` 0, 1 and 2.

Everything goes through the command line, one run after the other; files lie under OUT/staleness_N. The curve
is the mean reward of the steps that ended within each tenth of the time: a run that takes more steps in the
same time is ahead only where they teach as much.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.train import ROOT, unspiral

TENTHS = 10


def arguments(parser: Any) -> None:
    parser.add_argument("--model", help="default: the configuration's")
    parser.add_argument("--data", type=Path, help="folder with corpus.jsonl, train.jsonl and test.jsonl")
    parser.add_argument("--config", type=Path, default=ROOT / "examples/wiki_qa_gpu.yaml")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=5.0, help="of training, for each of them")
    parser.add_argument("--seconds", type=float, default=560.0, help="for each run, start-up included")
    parser.add_argument("--set", nargs="*", default=[], help="changes to the configuration")


def run(args: Any) -> dict[str, Any]:
    folder = args.out.resolve()
    changes = [f"run.dir={folder}", "trainer.steps=100000", f"trainer.max_minutes={args.minutes}"]
    if args.model:
        changes.append(f"model.path={Path(args.model).resolve()}")
    if args.data:
        data = args.data.resolve()
        changes += [
            f"data.train={data / 'train.jsonl'}",
            f"data.eval={data / 'test.jsonl'}",
            f"retriever.corpus={data / 'corpus.jsonl'}",
        ]
    out: dict[str, Any] = {"minutes": args.minutes}
    for staleness in args.staleness:
        name = f"staleness_{staleness}"
        if (folder / name).exists():
            raise SystemExit(f"{folder / name} holds an earlier run; give another --out")
        began = time.monotonic()
        unspiral(
            "train",
            "--config",
            args.config.resolve(),
            *changes,
            *args.set,
            f"rollout.max_staleness={staleness}",
            f"run.name={name}",
            seconds=args.seconds,
        )
        out[name] = report(folder / name, args.minutes) | {"command_seconds": time.monotonic() - began}
        print(name, json.dumps(out[name]), flush=True)
    return out


def report(run_folder: Path, minutes: float) -> dict[str, Any]:
    """One run's steps, rewards over wall time, scores, and distance between sampler and learner."""
    summary = json.loads((run_folder / "summary.json").read_text())
    steps = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    ends, at = [], 0.0
    for step in steps:
        at += step["time/step"]
        ends.append(at)
    tenths: list[list[float]] = [[] for _ in range(TENTHS)]
    for end, step in zip(ends, steps, strict=True):
        if step.get("reward/mean") is not None:
            tenths[min(TENTHS - 1, int(TENTHS * end / (60 * minutes)))].append(step["reward/mean"])
    seconds = [step["time/step"] for step in steps[1:]] or ends
    gaps = [step["mismatch/abs_logp"] for step in steps if step.get("mismatch/abs_logp") is not None]
    return {
        "steps": len(steps),
        "step_seconds": statistics.median(seconds),
        "step_seconds_min": min(seconds),
        "step_seconds_max": max(seconds),
        "reward_by_tenth": [statistics.mean(rewards) if rewards else None for rewards in tenths],
        "em_before": summary.get("em_before"),
        "em_after": summary.get("em_after"),
        "mismatch": statistics.mean(gaps) if gaps else None,
        "stale_dropped": sum(step.get("rollout/stale_dropped") or 0 for step in steps),
    }


def table(out: dict[str, Any]) -> str:
    lines = [
        f"{out['minutes']:g} minutes of training each",
        f"{'max_staleness':14}{'steps':>7}{'s per step':>22}{'EM before':>11}{'after':>8}"
        f"{'mismatch':>10}{'dropped':>9}   reward by tenth of the time",
    ]
    for name, r in out.items():
        if not name.startswith("staleness_"):
            continue
        spread = f"{r['step_seconds']:.2f} ({r['step_seconds_min']:.2f} to {r['step_seconds_max']:.2f})"
        curve = " ".join("-" if m is None else f"{m:.3f}" for m in r["reward_by_tenth"])
        lines.append(
            f"{name.removeprefix('staleness_'):14}{r['steps']:7}{spread:>22}{shown(r['em_before']):>11}"
            f"{shown(r['em_after']):>8}{shown(r['mismatch'], 4):>10}{r['stale_dropped']:9.0f}   {curve}"
        )
    return "\n".join(lines)


def shown(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
