"""The doctor's call of a user's reward, on made trajectories: a right answer, a wrong one, and none."""

from __future__ import annotations

import asyncio
import math
from contextlib import closing
from itertools import islice
from pathlib import Path

from services.common.errors import UserError
from services.contracts import Action, FinishReason, Question, Reading, Trajectory
from trainer.commands.checks.findings import Finding, late, tried
from trainer.config.schema import Config
from trainer.data.named_columns import keys_of
from trainer.data.questions import parsed
from trainer.rewards import Reward, right_at
from trainer.rewards.calls import RewardCalls

SECONDS = 30.0
"""Longest wait for one call."""
MADE = Question("doctor", "In which country is Rome?", ("Italy",), "doctor")
"""Where there are no questions yet."""
WRONG = "zzyzx"
LOOKED_AT = 100
"""Questions among which one with an answer is looked for."""


def check_reward(config: Config, reward: Reward) -> Finding:
    """What the function gives each of them, or its own error."""
    kind = config.reward.kind
    trajectories = made(first_question(config), config.rollout.reading)
    # Where the run waits no longer than the doctor does, its own limit is kept, and named.
    limit = config.reward.timeout_seconds
    key = "reward.timeout_seconds" if limit <= SECONDS else None
    with closing(RewardCalls(reward, kind, min(limit, SECONDS), key=key)) as calls:
        earned = tried("reward.kind", kind, lambda: asyncio.run(calls.of(trajectories)))
    if isinstance(earned, Finding):
        if calls.waits_for():
            late.append(kind)
        return earned
    right, wrong, none = earned
    needed = right_at(reward, config.reward.right_at)
    seen = f"{kind}: a right answer {_earns(right)}, a wrong one {_earns(wrong)}, none {_earns(none)}"
    advice = ""
    if not math.isfinite(right):
        advice = "the function returned None or no finite number; a service that it asks may be away"
    elif right < needed:
        advice = (
            f"an answer counts as right from {needed:g} on, for metrics and LLDS; where yours earn less, set "
            "the attribute right_at of the function, or reward.right_at"
        )
    elif math.isfinite(wrong) and wrong >= needed:
        advice = f"a wrong answer earns as much as counts as right ({needed:g})"
    return Finding("reward.kind", "note" if advice else "good", seen, advice)


def made(question: Question, reading: Reading) -> list[Trajectory]:
    """Trajectories of one turn, without a search: with a golden answer, with another one, and with none."""
    answers = {"right": question.golden_answers[0], "wrong": WRONG}
    found = [
        _trajectory(name, question, reading, Action([0], [-1.0], 0, "answer", f"<answer> {answer} </answer>"))
        for name, answer in answers.items()
    ]
    none = Action([0], [-1.0], 0, "invalid", "I do not know.")
    return [*found, _trajectory("none", question, reading, none)]


def _trajectory(name: str, question: Question, reading: Reading, action: Action) -> Trajectory:
    finish: FinishReason = "answer" if action.kind == "answer" else "turns"
    return Trajectory(f"doctor-{name}", "doctor", question, [0], [action], finish, reading=reading)


def first_question(config: Config) -> Question:
    """The first question of the run, where it is here and can be read."""
    train = config.data.train
    if not Path(train).exists():
        return MADE
    try:
        keys = keys_of(config.data, train)
        rows = (item[1].question for item in parsed(Path(train), keys=keys) if isinstance(item, tuple))
        return next((q for q in islice(rows, LOOKED_AT) if q.golden_answers), MADE)
    except UserError:  # another line says so
        return MADE


def _earns(reward: float) -> str:
    return f"earns {reward:g}" if math.isfinite(reward) else "is left out"
