"""The table of the GPU runs in docs/study.md, from the files in benchmarks/results/wiki_qa_0.5b.

`python -m benchmarks.real_model` prints it; a test holds the page to it.
"""

from __future__ import annotations

import gzip
import json
from math import comb
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "wiki_qa_0.5b"
LAST = 10
"""Steps over which the last columns are averaged."""


def runs(folder: Path = RESULTS) -> dict[str, Any]:
    return json.loads((folder / "runs.json").read_text(encoding="utf-8"))["runs"]


def metrics(name: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def last_mean(rows: list[dict[str, Any]], key: str) -> float:
    """Mean over those of the last steps that have the metric."""
    values = [row[key] for row in rows[-LAST:] if row.get(key) is not None]
    return sum(values) / len(values)


def sign_test(a: str, b: str) -> tuple[int, int, float]:
    """Questions that only `a` and only `b` answers (strings of 0 and 1, paired), and the exact two-sided
    p."""
    only_a = sum(x > y for x, y in zip(a, b, strict=True))
    only_b = sum(x < y for x, y in zip(a, b, strict=True))
    n = only_a + only_b
    tail = sum(comb(n, k) for k in range(min(only_a, only_b) + 1)) / 2**n
    return only_a, only_b, min(1.0, 2 * tail)


def table() -> str:
    """Markdown: a row per run."""
    lines = [
        "| run | steps | reward, last 10 | EM greedy | EM sampled | fixed probe, nats | preserved that fell, "
        "last 10 "
        "| entropy, last 10 | first `likelihood` alarm | phase at the end |",
        "| --- " * 10 + "|",
    ]
    for name, run in runs().items():
        rows = metrics(name)
        em = {key: scores["overall"]["em"] for key, scores in run["evaluations"].items()}
        probe = [row["probe/fixed"] for row in rows if row.get("probe/fixed") is not None]
        alarm = next((a["step"] for a in run["alarms"] if a["rule"] == "likelihood"), "none")
        arm = f"LLDS-A {run['llds.lambda']:g}" if run["llds.lambda"] else "GRPO"
        lines.append(
            f"| {arm}, rate {run['lr']:.0e}, seed {run['seed']} | {run['steps']} | "
            f"{last_mean(rows, 'reward/mean'):.3f} "
            f"| {em['before_greedy']:.3f} -> {em['after_greedy']:.3f} "
            f"| {em['before_sampled']:.3f} -> {em['after_sampled']:.3f} | {probe[-1]:.2f} "
            f"| {last_mean(rows, 'displacement/share_negative'):.2f} | {last_mean(rows, 'entropy'):.3f} "
            f"| {alarm} | {run['phase']} |"
        )
    return "\n".join(lines)


def pair() -> str:
    """The two runs that differ in lambda alone, question by question, as one sentence."""
    named = runs()
    grpo = named["grpo_lr3e-6_s0"]["right"]["after_greedy"]
    llds = named["llds_lr3e-6_s0"]["right"]["after_greedy"]
    only_grpo, only_llds, p = sign_test(grpo, llds)
    return (
        f"Of the {len(grpo)} questions, {only_grpo} are answered by GRPO alone and {only_llds} by LLDS alone "
        f"(exact sign test, p = {p:.2f})."
    )


if __name__ == "__main__":
    print(table())
    print()
    print(pair())
