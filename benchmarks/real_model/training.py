"""The tables of the GPU runs in docs/study.md, from the files in benchmarks/results/wiki_qa_0.5b.

`python -m benchmarks.real_model` prints them; a test holds the page to them.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from math import comb
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "wiki_qa_0.5b"
LAST = 10
"""Steps over which the last columns are averaged."""
FALL = 5
"""Steps of a mean reward that may fall."""
SEEDS = (100, 101, 102)
"""Of the paired runs at 1e-5, and of those at half the rate."""
FIRST_LOTS = "runs.json"
HALF_RATE = "half_rate.json"
"""A later day's runs, from a warm start of their own: GRPO at 5e-6, and seed 100 at 1e-5 once more."""


@cache
def runs(file: str = FIRST_LOTS) -> dict[str, Any]:
    return json.loads((RESULTS / file).read_text(encoding="utf-8"))["runs"]


def metrics(name: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def last_mean(rows: list[dict[str, Any]], key: str, digits: int) -> str:
    """Mean over those of the last steps that have the metric; `-` where none has."""
    values = [row[key] for row in rows[-LAST:] if row.get(key) is not None]
    return f"{sum(values) / len(values):.{digits}f}" if values else "-"


def first_alarm(name: str, file: str = FIRST_LOTS) -> int | str:
    """Step of the first alarm of the rule `likelihood`."""
    return next((a["step"] for a in runs(file)[name]["alarms"] if a["rule"] == "likelihood"), "none")


def halved(rows: list[dict[str, Any]]) -> int | str:
    """First step at which the mean reward of FALL steps is under half of the best such mean before it."""
    rewards = [row["reward/mean"] for row in rows]
    means = [sum(rewards[i - FALL : i]) / FALL for i in range(FALL, len(rewards) + 1)]
    fallen = (i for i, mean in enumerate(means) if mean < max(means[: i + 1]) / 2)
    found = next(fallen, None)
    return "never" if found is None else int(rows[found + FALL - 1]["step"])


def sign_test(a: str, b: str) -> tuple[int, int, float]:
    """Questions that only `a` and only `b` answers (strings of 0 and 1, paired), and the exact two-sided
    p."""
    only_a = sum(x > y for x, y in zip(a, b, strict=True))
    only_b = sum(x < y for x, y in zip(a, b, strict=True))
    n = only_a + only_b
    tail = sum(comb(n, k) for k in range(min(only_a, only_b) + 1)) / 2**n
    return only_a, only_b, min(1.0, 2 * tail)


def table(file: str = FIRST_LOTS) -> str:
    """Markdown: a row per run of a file of results."""
    lines = [
        "| run | steps | reward, last 10 | EM greedy | EM sampled | fixed probe, nats | preserved that fell, "
        "last 10 | searches, last 10 "
        "| entropy, last 10 | first `likelihood` alarm | phase at the end |",
        "| --- " * 11 + "|",
    ]
    for name, run in runs(file).items():
        rows = metrics(name)
        em = {key: scores["overall"]["em"] for key, scores in run["evaluations"].items()}
        probe = [row["probe/fixed"] for row in rows if row.get("probe/fixed") is not None]
        lines.append(
            f"| {run_label(run)} | {run['steps']} | "
            f"{last_mean(rows, 'reward/mean', 3)} "
            f"| {em['before_greedy']:.3f} -> {em['after_greedy']:.3f} "
            f"| {em['before_sampled']:.3f} -> {em['after_sampled']:.3f} | {probe[-1]:.2f} "
            f"| {last_mean(rows, 'displacement/share_negative', 2)} "
            f"| {last_mean(rows, 'rollout/searches', 2)} | {last_mean(rows, 'entropy', 3)} "
            f"| {first_alarm(name, file)} | {run['phase']} |"
        )
    return "\n".join(lines)


def run_label(run: dict[str, Any]) -> str:
    """Loss, rate and seed of a run, as the tables name it."""
    loss = f"LLDS-A {run['llds.lambda']:g}" if run["llds.lambda"] else "GRPO"
    return f"{loss}, rate {run['lr']:.0e}, seed {run['seed']}"


def pair() -> str:
    """The two runs at 3e-6 that differ in lambda alone, question by question, as one sentence."""
    only_grpo, only_llds, p = sign_test(right_after("grpo_lr3e-6_s0"), right_after("llds_lr3e-6_s0"))
    questions = len(right_after("grpo_lr3e-6_s0"))
    return (
        f"Of the {questions} questions, {only_grpo} are answered by GRPO alone and {only_llds} by LLDS alone "
        f"(exact sign test, p = {p:.2f})."
    )


def right_after(name: str, file: str = FIRST_LOTS) -> str:
    """A 0 or 1 per question, by greedy decoding after training."""
    answers: str = runs(file)[name]["right"]["after_greedy"]
    return answers


def yes_or_no() -> str:
    """A 0 or 1 per question of 681: whether its golden answers are yes or no."""
    asked: str = json.loads((RESULTS / HALF_RATE).read_text(encoding="utf-8"))["yes_no"]
    return asked


def by_kind() -> str:
    """Markdown: of each run, right answers by greedy decoding before and after training, to questions that
    ask for yes or no and to all others."""
    asked = yes_or_no()
    lines = [
        f"| run | of {asked.count('1')} questions for yes or no | of the {asked.count('0')} others |",
        "| --- " * 3 + "|",
    ]
    for file in (FIRST_LOTS, HALF_RATE):
        for run in runs(file).values():
            cells = []
            for kind in "10":
                before, after = (
                    sum(mark == "1" for mark, of_kind in zip(right, asked, strict=True) if of_kind == kind)
                    for right in (run["right"]["before_greedy"], run["right"]["after_greedy"])
                )
                cells.append(f"{before} -> {after}")
            again = " (again)" if file == HALF_RATE and run["lr"] == 1e-5 else ""
            lines.append(f"| {run_label(run)}{again} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def half_rate() -> str:
    """Markdown: a row per seed at 5e-6, its greedy answers after training beside those before."""
    lines = [
        "| seed | steps | EM greedy before | after | difference | questions answered before alone "
        "| after alone | p | reward, highest mean of 5 | reward under half of its best "
        "| largest gradient norm |",
        "| --- " * 11 + "|",
    ]
    for seed in SEEDS:
        name = f"grpo_lr5e-6_s{seed}"
        run = runs(HALF_RATE)[name]
        before, after = (run["right"][f"{when}_greedy"] for when in ("before", "after"))
        only_before, only_after, p = sign_test(before, after)
        em = [right.count("1") / len(right) for right in (before, after)]
        rows = metrics(name)
        rewards = [row["reward/mean"] for row in rows]
        best = max(sum(rewards[i - FALL : i]) / FALL for i in range(FALL, len(rewards) + 1))
        norm = max(row.get("grad_norm/max", 0.0) for row in rows)
        lines.append(
            f"| {seed} | {run['steps']} | {em[0]:.3f} | {em[1]:.3f} | {em[1] - em[0]:+.3f} | {only_before} "
            f"| {only_after} | {p:.2f} | {best:.3f} | {halved(rows)} | {norm:.1f} |"
        )
    return "\n".join(lines)


def pairs() -> str:
    """Markdown: a row per seed at 1e-5, GRPO beside LLDS."""
    lines = [
        "| seed | EM greedy at the end, GRPO | LLDS-A 0.2 | difference | questions answered by GRPO alone "
        "| by LLDS alone | `likelihood` alarm, GRPO | reward under half of its best, GRPO "
        "| largest gradient norm, GRPO | LLDS-A 0.2 |",
        "| --- " * 10 + "|",
    ]
    for seed in SEEDS:
        names = [f"{arm}_lr1e-5_s{seed}" for arm in ("grpo", "llds")]
        grpo, llds = (right_after(name) for name in names)
        em = [right.count("1") / len(right) for right in (grpo, llds)]
        only_grpo, only_llds, _ = sign_test(grpo, llds)
        rows = [metrics(name) for name in names]
        norms = [max(row.get("grad_norm/max", 0.0) for row in of_run) for of_run in rows]
        lines.append(
            f"| {seed} | {em[0]:.3f} | {em[1]:.3f} | {em[1] - em[0]:+.3f} | {only_grpo} | {only_llds} "
            f"| {first_alarm(names[0])} | {halved(rows[0])} | {norms[0]:.1f} | {norms[1]:.1f} |"
        )
    return "\n".join(lines)
