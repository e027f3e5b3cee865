"""The doctor's trial call of a user's retriever, tool and metrics, as a run calls them: one query, one
question, three made trajectories. What returns another form than a run takes is found before anything
starts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TypeVar, cast

from retriever_service.search.users_index import Search, call_search
from services.common.counting import counted
from services.common.errors import UserError
from services.common.printing.harmless import in_one_line
from services.contracts import Question
from services.rollout.worker.tools import Toolbox
from trainer.commands.checks.doctor_reward import made
from trainer.commands.checks.findings import Finding, tried
from trainer.config.schema import Config
from trainer.loop.records.users_metrics import RUNS_OWN, StepMetrics, UsersMetrics

T = TypeVar("T")
SECONDS = 30.0
"""Longest wait for one call."""
SHOWN = 60
"""Characters of a question or an observation that are shown."""


def check_search(key: str, path: str, search: Search, question: Question, topk: int) -> Finding:
    """Whether a search of a question returns passages with scores, as many as asked for, best first."""

    def call() -> list[tuple[str, float]]:
        where = f"{key}={path}"
        return in_time(where, lambda: call_search(where, search, question.text, topk))

    found = tried(key, path, call)
    if isinstance(found, Finding):
        return found
    seen = f"{path}: {counted(len(found), 'passage')} of {in_one_line(question.text, SHOWN)!r}"
    notes = []
    if len(found) > topk:
        notes.append(f"it was asked for {topk}; a run takes the first {topk}")
    scores = [score for _, score in found]
    if (at := next((n for n, pair in enumerate(pairwise(scores), 1) if pair[1] > pair[0]), None)) is not None:
        notes.append(
            f"passage {at} has a higher score ({scores[at]:g}) than the one before it ({scores[at - 1]:g}); "
            "expected best first: the policy reads them in the order that they come in"
        )
    return Finding(key, "note" if notes else "good", seen, "; ".join(notes))


def check_tool(key: str, path: str, tool: Callable[..., object], question: Question) -> Finding:
    """What a tool returns for a text that no tool expects: a policy writes anything."""
    name = key.rpartition(".")[2]
    box = Toolbox({name: tool}, question, SECONDS)
    try:
        text = asyncio.run(box.call(name, question.text))
    except TimeoutError:
        return Finding(key, "bad", path, f"{key}={path}: no result of one call within {SECONDS:g} s")
    except UserError as error:
        if error.__cause__ is None:  # of its form, and not raised by the tool
            return Finding(key, "bad", path, str(error))
        advice = f"{error}: a policy writes anything, and a tool that raises ends the run; return a text"
        return Finding(key, "note", path, advice)
    return Finding(
        key, "good", f"{path}: {in_one_line(text, SHOWN)!r} for {in_one_line(question.text, SHOWN)!r}"
    )


def check_metrics(key: str, path: str, function: StepMetrics, config: Config, question: Question) -> Finding:
    """The names of the numbers that it makes of a right answer, a wrong one, and none."""
    said: list[str] = []
    trajectories = made(question, config.rollout.reading)
    metrics = UsersMetrics({path: function}, said.append)
    numbers = tried(key, path, lambda: in_time(path, lambda: metrics.of(trajectories, [1.0, 0.0, 0.0], {})))
    if isinstance(numbers, Finding):
        return numbers
    if said:
        return Finding(
            key, "bad", path, f"{said[0]}; expected numbers by name, such as {{'my/queries': 1.0}}"
        )
    if taken := [name for name in numbers if name.partition("/")[0] in RUNS_OWN]:
        return Finding(
            key,
            "note",
            f"{path}: {', '.join(numbers)}",
            f"{', '.join(taken)}: begins as metrics of a run do, which leaves out a name that it uses "
            "itself; give another, such as my/name",
        )
    return Finding(key, "good", f"{path}: {', '.join(numbers) or 'no number for an answer without a search'}")


def check_call(key: str, path: str, loaded: object, config: Config, question: Question) -> Finding | None:
    """The trial of a part that was loaded; None for a part that no call is made of here."""
    if key.endswith("retriever.index"):
        return check_search(key, path, cast(Search, loaded), question, config.rollout.topk)
    if key.startswith("rollout.tools."):
        tools = cast(Mapping[str, Callable[..., object]], loaded)
        return check_tool(key, path, next(iter(tools.values())), question)
    if key == "trainer.metrics":
        return check_metrics(key, path, cast(Mapping[str, StepMetrics], loaded)[path], config, question)
    return None


def in_time(where: str, call: Callable[[], T]) -> T:
    """The result of a call. Raises what it raises, and UserError where it lasts longer than SECONDS; it then
    goes on in a thread that nobody waits for."""
    done: list[T] = []
    raised: list[Exception] = []

    def work() -> None:
        try:
            done.append(call())
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=work, name="doctor-trial", daemon=True)
    thread.start()
    thread.join(SECONDS)
    if raised:
        raise raised[0]
    if not done:
        raise UserError(f"{where}: no result of one call within {SECONDS:g} s")
    return done[0]
