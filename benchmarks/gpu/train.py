"""A real model on real questions: warm start on the tags, GRPO + LLDS with every service, exact match before
and after by data source.

Everything goes through the command line, as a user would do it. Files of the run lie under OUT/train.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def arguments(parser: Any) -> None:
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with corpus.jsonl, train.jsonl and test.jsonl"
    )
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="of training, start-up and evaluation not counted"
    )
    parser.add_argument("--config", type=Path, default=ROOT / "examples/wiki_qa_gpu.yaml")
    parser.add_argument("--warm-start", type=int, default=1000, help="questions; 0: train the model as it is")
    parser.add_argument("--warm-start-lr", type=float, default=1e-5)
    parser.add_argument(
        "--seconds", type=float, default=560.0, help="everything together; a run that takes longer is ended"
    )
    parser.add_argument(
        "--set", nargs="*", default=[], help="changes to the configuration, such as learner.lr=2e-6"
    )


def unspiral(*arguments: Any, seconds: float) -> None:
    """A command; its output goes to this terminal. It is asked to stop when its time is over, and given 20 s
    for it."""
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", *map(str, arguments)], cwd=ROOT, env=environment
    )
    try:
        code = process.wait(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        process.terminate()
        code = process.wait(timeout=60)
    if code not in (0, 143):
        raise SystemExit(f"unspiral {arguments[0]} ended with status {code}")


def run(args: Any) -> dict[str, Any]:
    began, folder = time.monotonic(), args.out.resolve()
    if (folder / "train").exists():  # the run would be refused, but after the warm start
        raise SystemExit(f"{folder / 'train'} holds an earlier run; give another --out")
    changes = [
        f"data.train={args.data.resolve() / 'train.jsonl'}",
        f"data.eval={args.data.resolve() / 'test.jsonl'}",
        f"retriever.corpus={args.data.resolve() / 'corpus.jsonl'}",
        f"run.dir={folder}",
        *args.set,
    ]
    common = ["--config", args.config.resolve()]
    model, out = str(Path(args.model).resolve()), {"warm_start_seconds": 0.0}
    if args.warm_start:
        target = folder / "warm_model"
        unspiral(
            "warm-start", *common, "--out", target, "--questions", args.warm_start,
            "--lr", args.warm_start_lr, *changes, f"model.path={model}", "run.name=warm_start",
            seconds=args.seconds,
        )  # fmt: skip
        model, out["warm_start_seconds"] = str(target), time.monotonic() - began
    left = args.seconds - (time.monotonic() - began)
    unspiral(
        "train",
        *common,
        *changes,
        f"model.path={model}",
        "run.name=train",
        f"trainer.max_minutes={args.minutes}",
        seconds=left,
    )
    return out | report(folder / "train") | {"seconds": time.monotonic() - began}


def report(run_folder: Path) -> dict[str, Any]:
    """Summary, curve, scores by source, and examples of a run's folder."""
    summary = json.loads((run_folder / "summary.json").read_text())
    metrics = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    keys = (
        "step",
        "reward/mean",
        "reward/em",
        "rollout/searches",
        "rollout/valid",
        "mismatch/abs_logp",
        "entropy",
        "time/step",
    )
    evaluations = {}
    for line in (run_folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "evaluation":
            evaluations[event["tag"]] = {"overall": event["overall"], "sources": event["sources"]}
    return {
        "summary": summary,
        "curve": [{k: m.get(k) for k in keys} for m in metrics],
        "evaluations": evaluations,
        "examples": examples(run_folder / "trajectories"),
    }


def examples(folder: Path, wanted: int = 3) -> list[dict[str, Any]]:
    """What the model wrote for the same questions before and after, documents left out: first those that
    became right."""
    files = [folder / f"eval_{tag}_greedy.jsonl" for tag in ("before", "after")]
    if not all(f.is_file() for f in files):
        return []
    pairs = zip(*([json.loads(line) for line in f.read_text().splitlines()] for f in files), strict=True)
    ranked = sorted(pairs, key=lambda p: p[0]["reward"] - p[1]["reward"])
    return [
        {
            "question": before["question"],
            "golden_answers": before["golden_answers"][:3],
            **{
                tag: {
                    "em": t["reward"],
                    "text": [s["text"] if s["by"] == "model" else "[documents]" for s in t["segments"]],
                }
                for tag, t in (("before", before), ("after", after))
            },
        }
        for before, after in ranked[:wanted]
    ]


def table(out: dict[str, Any]) -> str:
    lines = [
        f"{out['summary']['steps']} steps, {out['seconds']:.0f} s in all, warm start "
        f"{out['warm_start_seconds']:.0f} s"
    ]
    curve = [m["reward/mean"] for m in out["curve"] if m["reward/mean"] is not None]
    width = max(1, len(curve) // 10)
    means = [sum(curve[i : i + width]) / len(curve[i : i + width]) for i in range(0, len(curve), width)]
    lines.append("reward " + " ".join(f"{m:.3f}" for m in means))
    before, after = (out["evaluations"].get(tag, {}) for tag in ("before", "after"))
    for name in ["overall", *before.get("sources", {})]:
        row = [
            e.get("overall") if name == "overall" else e.get("sources", {}).get(name) for e in (before, after)
        ]
        em = [f"{r['em']:.3f}" if r else "-" for r in row]
        lines.append(f"  EM {name:24} {em[0]:>6} -> {em[1]:>6}  (n {row[0]['n'] if row[0] else 0})")
    for name, value in out["summary"].get("performance", {}).items():
        lines.append(f"  {name:24} {value:.4g}")
    for example in out["examples"]:
        lines.append(f"Q {example['question']} | {example['golden_answers']}")
        for tag in ("before", "after"):
            text = " ".join(example[tag]["text"])
            lines.append(f"  {tag} (EM {example[tag]['em']:g}): {' '.join(text.split())[:400]}")
    return "\n".join(lines)
