"""Made trajectories in which the run's own tools were called, for rewards that read what these say."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from services.common.errors import UserError
from services.contracts import Action, Observation, Question, Trajectory
from services.rollout.worker.tools import Toolbox, load_tools
from trainer.commands.checks.doctor_calls import SECONDS, in_time, leave_loop, on_one_loop
from trainer.commands.checks.doctor_reward import WRONG, answered, trajectory
from trainer.config.schema import Config


class Pair(NamedTuple):
    """Trajectories that call one tool with what they answer then."""

    right: Trajectory
    wrong: Trajectory


def after_tools(config: Config, question: Question) -> dict[str, Pair]:
    """One pair for each tool that answers to both; what is wrong with the others is told of themselves."""
    pairs = {}
    seconds = min(config.rollout.tool_timeout_seconds, SECONDS)
    for name, path in config.rollout.tools.items():
        try:
            tools = load_tools({name: path})
            made = []
            for kind, text in (("right", question.golden_answers[0]), ("wrong", WRONG)):
                box = Toolbox(tools, question, seconds)
                call = partial(on_one_loop, _said(box, name, text))
                said = in_time(f"rollout.tools.{name}: no result", call, None, seconds + 1)
                call_of_it = Action([0], [-1.0], 0, "tool", f"<{name}> {text} </{name}>", text, tool=name)
                call_of_it.search_seconds = 0.01
                shown = Observation([0], f"<information> {said} </information>")
                segments: list[Action | Observation] = [call_of_it, shown, answered(text)]
                made.append(trajectory(f"{name}-{kind}", question, config.rollout.reading, segments))
        except (UserError, TimeoutError):
            leave_loop()
            continue
        pairs[name] = Pair(*made)
    return pairs


async def _said(box: Toolbox, name: str, text: str) -> str:
    try:
        return await box.call(name, text)
    finally:
        await box.close()
