"""The doctor's call of a user's reward, on made trajectories: a right answer, a wrong one, none, and a right
one after a search."""

from __future__ import annotations

import ast
import asyncio
import inspect
import math
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, cast

from services.common.errors import UserError
from services.common.loading.user_code import is_async
from services.contracts import Action, FinishReason, Observation, Question, Reading, Trajectory
from trainer.commands.checks.crowd import Crowd
from trainer.commands.checks.doctor_rows import Uneven, uneven_rows
from trainer.commands.checks.findings import Finding, late, tried
from trainer.config.schema import Config
from trainer.data.named_columns import keys_of
from trainer.data.questions import parsed
from trainer.rewards import Reward, overrides, right_at
from trainer.rewards.calls import RewardCalls

SECONDS = 30.0
"""Longest wait for one call."""
SLOW_SECONDS = 30.0
"""Time for the rewards of a step from which on a note tells it."""
MADE = Question("doctor", "In which country is Rome?", ("Italy",), "doctor")
"""Where there are no questions yet."""
IN_TURN_SECONDS = 0.1
"""A first call that is shorter says nothing of those beside it."""
WRONG = "zzyzx"
FOUND = "Rome\nRome is a town in Italy."
LOOKED_AT = 100
"""Questions among which one with an answer is looked for."""


AfterTools = Callable[[Config, Question], Mapping[str, tuple[Trajectory, Trajectory]]]
"""By the name of a tool of the run's: a right answer and a wrong one, each after a call of it."""


def check_reward(config: Config, reward: Reward, after_tools: AfterTools | None = None) -> Finding:
    """What the function gives each of them, or its own error. after_tools: is asked where all earn the same,
    as with a reward that reads what an environment said."""
    kind = config.reward.kind
    question = first_question(config)
    trajectories = made(question, config.rollout.reading)
    # Where the run waits no longer than the doctor does, its own limit is kept, and named.
    limit = config.reward.timeout_seconds
    key = "reward.timeout_seconds" if limit <= SECONDS else None
    most = config.reward.concurrency
    with closing(RewardCalls(reward, kind, min(limit, SECONDS), key=key, concurrency=most)) as calls:
        took = _Took(len(trajectories) - 1, most)
        earned = tried("reward.kind", kind, lambda: _timed(calls, trajectories, took))
        told: dict[str, tuple[float, float]] | Finding = {}
        flat = not isinstance(earned, Finding) and len(set(earned)) == 1 and math.isfinite(earned[0])
        if after_tools and flat:
            pairs = after_tools(config, question)
            told = tried("reward.kind", kind, lambda: _earned_after(calls, pairs))
        if not isinstance(earned, Finding) and (uneven := uneven_rows(config)):
            again = tried("reward.kind", kind, lambda: _of_rows(calls, uneven, config))
            earned = again if isinstance(again, Finding) else earned
    if isinstance(earned, Finding) or isinstance(told, Finding):
        if calls.waits_for():
            late.append(kind)
        return earned if isinstance(earned, Finding) else cast(Finding, told)
    right, wrong, none, searched = earned
    needed = right_at(reward, config.reward.right_at)
    how = "lower reward.right_at, or take it out and set the attribute right_at of the function"
    if config.reward.right_at is None:
        how = "set the attribute right_at of the function, or reward.right_at"
    seen = f"{kind}: a right answer {_earns(right)}, a wrong one {_earns(wrong)}, none {_earns(none)}"
    if _earns(searched) != _earns(right):
        seen += f"; a right one after a search {_earns(searched)}"
    for name, (well, badly) in told.items():
        seen += f"; after <{name}> a right one {_earns(well)}, a wrong one {_earns(badly)}"
    if not any(map(math.isfinite, earned)) and returns_nothing(reward):
        advice = "it returns nothing: no `return` in it has a value; is one missing?"
        return Finding("reward.kind", "bad", seen, advice)
    by_tool = next((pair for pair in told.values() if pair[0] != pair[1]), None)
    if by_tool and all(map(math.isfinite, by_tool)):  # the reward is of what the tool said
        right, wrong = by_tool
        searched, none = right, min(none, wrong)
    notes = [
        *_notes(right, wrong, none, searched, needed, how),
        *_slow(config, took, is_async(inspect.unwrap(reward))),
    ]
    if told and not by_tool:
        notes.append("calls of the tools changed nothing: a reward that reads what they say may need others")
    if config.reward.right_at is not None:
        seen += f"; right is from {needed:g} on (reward.right_at)"
    if line := overrides(reward, config.reward.right_at):
        notes.insert(0, line)
    advice = "; ".join(notes)
    return Finding("reward.kind", "note" if advice else "good", seen, advice)


class _Took:
    """How long the first call took, and the others, of which so many may run at a time."""

    def __init__(self, others: int, most: int) -> None:
        self._others = others
        self._most = most
        self.first = 0.0
        self.rest = 0.0

    @property
    def of_one(self) -> float:
        """Seconds of one call beside others."""
        return max(self.first, self.rest / math.ceil(self._others / self._most))

    @property
    def in_turn(self) -> bool:
        """Whether calls that may run together waited for each other."""
        return (
            self._most > 1 and self.first > IN_TURN_SECONDS and self.rest > (self._others - 0.5) * self.first
        )


def _timed(calls: RewardCalls, trajectories: list[Trajectory], took: _Took) -> list[float]:
    """What they earn: the first by itself, the others together."""
    began = time.monotonic()
    earned = asyncio.run(calls.of(trajectories[:1]))
    took.first = time.monotonic() - began
    earned += asyncio.run(calls.of(trajectories[1:]))
    took.rest = time.monotonic() - began - took.first
    return earned


def _of_rows(calls: RewardCalls, uneven: list[Uneven], config: Config) -> None:
    for one in uneven:
        _of_row(calls, one, config)


def _of_row(calls: RewardCalls, uneven: Uneven, config: Config) -> None:
    """A right answer to a question that lacks a column which others have. Raises UserError."""
    question = uneven.question
    right = [answered(question.golden_answers[0] if question.golden_answers else WRONG)]
    try:
        asyncio.run(calls.of([trajectory("uneven", question, config.rollout.reading, [*right])]))
    except UserError as error:
        raise UserError(
            f"{error}; a run ends when that row is drawn ({uneven}): fill the column, or read it by "
            "`question.columns.get(name)`"
        ) from error


def _earned_after(
    calls: RewardCalls, pairs: Mapping[str, tuple[Trajectory, Trajectory]]
) -> dict[str, tuple[float, float]]:
    """What a right answer and a wrong one earn after each tool."""
    earned = {}
    for name, pair in pairs.items():
        right, wrong = asyncio.run(calls.of(list(pair)))
        earned[name] = (right, wrong)
    return earned


def _notes(
    right: float, wrong: float, none: float, searched: float, needed: float, how: str
) -> Iterator[str]:
    """What is most likely meant otherwise, the gravest first. how: what makes an answer right that earns
    less."""
    others = {"a wrong answer": wrong, "no answer": none}
    if not any(map(math.isfinite, (right, wrong, none, searched))):
        yield "the function returned None or no finite number; a service that it asks may be away"
        return
    asked = {"a right answer": right, **others}
    if math.isfinite(right):
        asked["a right one after a search"] = searched
    if lost := [name for name, reward in asked.items() if not math.isfinite(reward)]:
        yield (
            f"it returned None or no finite number for {' and '.join(lost)}: such trajectories are left out "
            "of the training; is a service that it asks away, or a `return` missing on that way? What earns "
            "nothing earns 0"
        )
    if not math.isfinite(right):
        return
    if more := [name for name, reward in others.items() if math.isfinite(reward) and reward > right]:
        yield (
            f"{' and '.join(more)} {'earns' if len(more) == 1 else 'earn'} more than a right answer, which "
            "is what a run would teach: check the reward's sign, and what it compares"
        )
        return
    if right == wrong == none:
        yield (
            "all three earn the same, and nothing is learned of rewards that are equal: does it compare "
            "trainer.rewards.final_answer(trajectory) with trajectory.question.golden_answers?"
        )
    elif right < needed:
        yield (
            f"an answer counts as right from {needed:g} on, for metrics and LLDS; where yours earn less, "
            f"{how}"
        )
    if math.isfinite(wrong) and wrong >= needed:
        yield f"a wrong answer earns as much as counts as right ({needed:g})"


def _slow(config: Config, took: _Took, awaited: bool) -> Iterator[str]:
    """Where the rewards of a step take long. awaited: the function is `async`."""
    in_turn = awaited and took.in_turn
    crowd = Crowd.of(config, 1 if in_turn else config.reward.concurrency)
    seconds = took.first if in_turn else took.of_one
    if (longest := crowd.waits(seconds)) > SLOW_SECONDS:
        remedy = (
            "it blocks its event loop, and all other calls with it: await what it waits for"
            if in_turn
            else crowd.remedy("reward")
        )
        yield (
            f"a call took {seconds:.2g} s, so those of the {crowd.trajectories} trajectories of a step take "
            f"{longest:.0f} s; {remedy}"
        )


def returns_nothing(function: Any) -> bool:
    """Whether its source shows that it never returns a value; False where that cannot be seen."""
    plain = inspect.unwrap(function)
    if not inspect.isroutine(plain):
        plain = type(plain).__call__
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    except (TypeError, OSError, SyntaxError, ValueError):  # none in Python, or a part of a line
        return False
    defined = tree.body[0] if tree.body else None
    return isinstance(defined, ast.FunctionDef) and not any(_gives_a_value(node) for node in defined.body)


def _gives_a_value(node: ast.AST) -> bool:
    """Whether a `return` with a value, or a `yield`, stands in it, functions and classes within left out."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return False
    if isinstance(node, ast.Return):
        nothing = node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None)
        return not nothing
    return isinstance(node, ast.Yield | ast.YieldFrom) or any(map(_gives_a_value, ast.iter_child_nodes(node)))


def answered(answer: str) -> Action:
    """A last turn."""
    return Action([0], [-1.0], 0, "answer", f"<answer> {answer} </answer>")


def made(question: Question, reading: Reading) -> list[Trajectory]:
    """Trajectories with a golden answer, with another one, with none, and with a golden one after a search:
    it has what a run's trajectories have."""

    right, wrong = answered(question.golden_answers[0]), answered(WRONG)
    none = Action([0], [-1.0], 0, "invalid", "I do not know.")
    search = Action([0], [-1.0], 0, "search", f"<search> {question.text} </search>", question.text)
    search.document_ids, search.documents, search.search_seconds = ["doctor-0"], [FOUND], 0.01
    shown = Observation([0], f"<information> {FOUND} </information>")
    made_of: dict[str, list[Action | Observation]] = {
        "right": [right],
        "wrong": [wrong],
        "none": [none],
        "searched": [search, shown, right],
    }
    return [trajectory(name, question, reading, segments) for name, segments in made_of.items()]


def trajectory(
    name: str, question: Question, reading: Reading, segments: list[Action | Observation]
) -> Trajectory:
    """One that is not stored anywhere."""
    last = segments[-1]
    finish: FinishReason = "answer" if isinstance(last, Action) and last.kind == "answer" else "turns"
    return Trajectory(f"doctor-{name}", "doctor", question, [0], segments, finish, reading=reading)


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
