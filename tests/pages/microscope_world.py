"""Sampled trajectories for tests of the microscope: one group of a collapsing run, as a trainer posts it."""

from __future__ import annotations

from typing import Any

SHARED = ["<search>", " who", " founded", " Arl", "</search>"]
DOCUMENT = {"id": "d7", "title": "Arl", "text": "Arl was founded by Ines Tobar in 1412."}


def trajectory(uid: str, **changes: Any) -> dict[str, Any]:
    """A right answer after one search; `fall` is what each of its tokens loses, in nats."""
    fall = changes.pop("fall", 0.1)
    answer = changes.pop("answer", "Ines Tobar")
    right = changes.pop("right", True)
    after = changes.pop("after", True)
    golden = answer if right else "Ines Tobar"
    words = ["<answer>", *(f" {word}" for word in answer.split()), " </answer>"]
    before = [[-0.1 * (k + 1) for k in range(len(part))] for part in (SHARED, words)]
    falls = [[fall + 0.01 * k for k in range(len(part))] for part in before]

    def written(part: int, tokens: list[str], **more: Any) -> dict[str, Any]:
        fallen = [b - f for b, f in zip(before[part], falls[part], strict=True)]
        return {
            "by": "model",
            "tokens": tokens,
            "logp_before": before[part],
            "held": [k for k, f in enumerate(falls[part]) if f > 0] if right else [],
            "policy_version": 3,
            "logp_after": fallen if after else None,
            **more,
        }

    made = {
        "uid": uid,
        "group": "q1",
        "question": "Who founded Arl?",
        "data_source": "towns",
        "prompt": "Question: Who founded Arl?\n",
        "reward": 1.0 if right else 0.0,
        "right": right,
        "advantage": 0.7 if right else -0.7,
        "preserved": right,
        "finish": "answer",
        "valid": True,
        "scoring": {
            "function": "em",
            "answer": answer,
            "normalized": answer.lower(),
            "golden": [{"text": golden, "normalized": golden.lower(), "equal": right}],
        },
        "segments": [
            written(0, SHARED, kind="search", query="who founded Arl", documents=[DOCUMENT], seconds=0.5),
            {"by": "environment", "text": "<information> Arl was founded .. </information>", "tokens": 9},
            written(1, words, kind="answer", seconds=0.25),
        ],
    }
    return made | changes


TOWNS = ("Arl", "Brune", "Corva")
OTHERS = ("Ines Tobar", "Oda Merl", "Arl", "the guild of weavers of Arl")


def collapsing_step(step: int, fall: float) -> list[dict[str, Any]]:
    """Twelve trajectories of three towns, whose right answers lose `fall` nats per token on the average, the
    first town's most; two groups mix right and wrong answers."""
    made = []
    for g, town in enumerate(TOWNS):
        for i, answer in enumerate(OTHERS):
            right = i == 0 or (g == 1 and i == 3)
            lost = (fall if right else 1.5 * fall) * (1.3 - 0.3 * g) + 0.004 * i
            one = trajectory(
                f"{step}-{g}-{i}", fall=lost, right=right and g < 2, answer=answer, group=f"{step}-{g}"
            )
            one["question"] = f"Who founded {town}?"
            one["data_source"] = "towns" if g < 2 else "guilds"
            one["segments"][0]["logp_sampler"] = [b - 0.01 for b in one["segments"][0]["logp_before"]]
            one["segments"][2]["logp_sampler"] = [b + 0.01 for b in one["segments"][2]["logp_before"]]
            made.append(one)
    made[3]["finish"] = "length"
    made[7]["valid"] = False
    return made


def frozen_at(step: int, fallen: float) -> dict[str, Any]:
    """A right answer of step 0 as a later step scores it again: `fallen` nats per token less."""
    one = trajectory("0-1-0", group="0-1", probe=True, question="Who founded Brune?", fall=fallen)
    return one | {"reward": None, "advantage": 0.0, "preserved": None, "scoring": None}
