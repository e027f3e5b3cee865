"""`unspiral report --paper`: the figures of the LLDS paper (arXiv 2512.04220) as plots of any runs.

A figure that a run has not recorded says so, instead of being left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from services.likelihood.exports import fixed_prompts

Line = tuple[str, str]
"""Metric and label. A metric that ends with `*` stands for all with that prefix and a number after it."""


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Figure:
    """says: what the figure shows, in a sentence."""

    title: str
    says: str
    charts: tuple[Chart, ...]


FIGURES = (
    Figure(
        "Three phases",
        "In the paper the likelihood of right answers falls while the reward still rises; then "
        "both fall, and the "
        "gradient norm grows.",
        (
            Chart("Reward", "mean of the batch", (("reward/mean", "reward"),)),
            Chart(
                "Likelihood of right answers",
                "nats per token",
                (("logp/right", "this batch"), ("probe/fixed", "frozen at the start")),
            ),
            Chart("Gradient norm", "before clipping", (("grad_norm", "mean"), ("grad_norm/max", "largest"))),
        ),
    ),
    Figure(
        "Displacement by an update",
        "What one update did to the log-prob of answers with advantage of at least 0: below 0 is "
        "likelihood lost; "
        "in the paper more than half of the answers end there. Answers are those of each step's "
        "batch, under the "
        "weights of that step; figure 9 has those to fixed prompts.",
        (
            Chart(
                "Displacement",
                "nats per token",
                (("displacement/p10", "10 %"), ("displacement/p50", "median"), ("displacement/p90", "90 %")),
            ),
            Chart("Answers that lost likelihood", "share", (("displacement/share_negative", "share"),)),
        ),
    ),
    Figure(
        "Entropy before a fall",
        "In the paper entropy spikes before the collapse, while length and searches stay as they were.",
        (
            Chart("Entropy", "nats per token", (("entropy", "entropy"),)),
            Chart("Length", "model tokens", (("rollout/length", "length"),)),
            Chart("Searches", "per trajectory", (("rollout/searches", "searches"),)),
        ),
    ),
    Figure(
        "Wrong answers with a right one's documents",
        "Share of wrong answers whose first search found the same documents as a right answer of "
        "the group: they "
        "share tokens with it, which the penalty of the wrong answer pushes down.",
        (Chart("Same documents", "share of wrong", (("retrieval/wrong_same_documents", "share"),)),),
    ),
    Figure(
        "Likelihood by action",
        "Log-prob of right and wrong answers by action: the first search, the second, and so on.",
        (
            Chart("Right answers", "nats per token", (("logp/right_action_*", "action"),)),
            Chart("Wrong answers", "nats per token", (("logp/wrong_action_*", "action"),)),
        ),
    ),
    Figure(
        "Surprise by tool rounds",
        "Negative log-prob of trajectories by their number of tool rounds.",
        (Chart("Negative log-prob", "nats per token", (("nll/rounds_*", "rounds"),)),),
    ),
    Figure(
        "Wrong below right",
        "Log-prob of wrong answers beside that of right ones: the shared penalty acts where the "
        "two are close.",
        (
            Chart("Right and wrong", "nats per token", (("logp/right", "right"), ("logp/wrong", "wrong"))),
            Chart(
                "Wrong answers",
                "nats per token",
                (("logp/wrong_p10", "10 %"), ("logp/wrong_p50", "median"), ("logp/wrong_p90", "90 %")),
            ),
        ),
    ),
    Figure(
        "Searches per question",
        "Give runs of GRPO, LLDS and LLDS-MA to compare them: a run that is stuck at one search is "
        "what the weight "
        "on the answer (LLDS-MA) is for.",
        (
            Chart("Searches", "per trajectory", (("rollout/searches", "searches"),)),
            Chart("Weight of the answer's tokens", "LLDS-MA alone", (("llds/beta", "beta"),)),
        ),
    ),
    Figure(
        "Displacement by one update, on fixed prompts",
        "Sampled answers to the same prompts at each checkpoint. Each prompt's group takes one "
        "optimiser step from the checkpoint's weights: a right answer below 0 lost likelihood by the "
        "very step that was to reward it. Bars: how alike the hidden states of right and wrong answers "
        "stay after their shared prefix; the less, the less of a wrong answer's penalty reaches a right one.",
        (),
    ),
)


def paper_figures(
    recorded: Mapping[str, Set[str]], fixed: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """The figures for the page. recorded: the metrics of each run by its name; fixed: what
    `fixed_prompts.measured` found of each."""
    figures: list[dict[str, Any]] = [
        {
            "title": f"{number}. {figure.title}",
            "note": " ".join([figure.says, *_missing(figure, recorded)]),
            "charts": [
                {"title": c.title, "unit": c.unit, "lines": _lines(c, frozenset().union(*recorded.values()))}
                for c in figure.charts
            ],
        }
        for number, figure in enumerate(FIGURES, 1)
    ]
    last = figures[-1]
    last["drawing"] = "\n".join(fixed_prompts.drawing(run, found) for run, found in fixed.items() if found)
    if without := [run for run, found in fixed.items() if not found]:
        last["note"] += f" Not measured of {', '.join(without)}: unspiral displacement RUN does it."
    return figures


def _lines(chart: Chart, names: Set[str]) -> list[Line]:
    """Those that some run has recorded, with numbered ones spelt out."""
    found: list[Line] = []
    for key, label in chart.lines:
        if not key.endswith("*"):
            found += [(key, label)] if key in names else []
            continue
        prefix = key[:-1]
        numbers = sorted(int(n[len(prefix) :]) for n in names if _numbered(n, prefix))
        found += [(f"{prefix}{n}", f"{label} {n + ('action' in prefix)}") for n in numbers]
    return found


def _numbered(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name[len(prefix) :].isdecimal()


def _missing(figure: Figure, recorded: Mapping[str, Set[str]]) -> list[str]:
    """A sentence for each chart of which some run has recorded nothing."""
    found = []
    for chart in figure.charts:
        without = [run for run, names in recorded.items() if not _lines(chart, names)]
        if without:
            found.append(f"{chart.title}: not recorded in {', '.join(without)}.")
    return found
