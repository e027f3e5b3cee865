"""`unspiral ask`: questions to a trained agent, answered on the terminal as it writes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Any

from services.agent.agent import Agent, AgentSpec
from services.agent.answers import answer_pair, search_call
from services.common.errors import UserError
from services.common.printing.console import Console
from services.common.processes import signals
from services.contracts import Action, Trajectory
from services.rollout.worker.watching import Event, Retrieved
from trainer.commands.agent.source import agent_spec
from trainer.commands.agent.transcript import Transcript
from trainer.session.output import complain

Say = Callable[[str], None]
PROMPT = "? "


def run_ask(
    checkpoint: str,
    question: str | None,
    *,
    retriever: str | None,
    overrides: list[str],
    temperature: float,
    seed: int | None,
    logprobs: bool,
    as_json: bool,
    say: Say,
) -> None:
    """Answer the question, or without one each line of standard input.

    Raises Stopped after SIGINT, SIGTERM or SIGHUP; one that comes while the model loads ends the process."""
    if question is not None and not question.strip():
        raise UserError("ask: the question is empty")
    with ExitStack() as parts:
        with signals.raised():
            spec = agent_spec(checkpoint, retriever, overrides, seed, parts, say)
        agent = Agent(spec)
        try:
            asyncio.run(_answer_all(agent, spec, question, temperature, logprobs, as_json, say))
        except signals.Stopped as stopped:
            if agent.ready:
                raise
            parts.close()
            _leave(stopped)


def _leave(stopped: signals.Stopped) -> None:
    """End the process: threads that load a model can't be told to stop, and would be waited for."""
    complain(f"unspiral: {stopped}")
    sys.stdout.flush()
    os._exit(stopped.exit_code)


async def _answer_all(
    agent: Agent,
    spec: AgentSpec,
    question: str | None,
    temperature: float,
    logprobs: bool,
    as_json: bool,
    say: Say,
) -> None:
    console = Console(highlight=False)
    async with signals.cancelled(lambda line: None):
        try:
            say(f"loading {spec.name}: {spec.settings.engine}, template {spec.settings.template}")
            await agent.start()
            async for asked in _questions(question):
                if as_json:
                    print(
                        json.dumps(await _as_json(agent, asked, temperature), ensure_ascii=False), flush=True
                    )
                else:
                    await _show(agent, asked, temperature, logprobs, console)
        finally:
            await agent.close()


async def _questions(question: str | None) -> AsyncIterator[str]:
    """The question, or the lines of standard input. On a terminal each is asked for."""
    if question is not None:
        yield question.strip()
        return
    on_terminal = sys.stdin.isatty()
    while True:
        line = await (_typed_line() if on_terminal else asyncio.to_thread(sys.stdin.readline))
        if not line:
            return
        if line.strip():
            yield line.strip()


async def _typed_line() -> str:
    """A line from the terminal, asked for. No thread waits for it: a thread that reads would hold up the end
    after Ctrl-C."""
    print(PROMPT, end="", file=sys.stderr, flush=True)
    loop = asyncio.get_running_loop()
    typed = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), typed.set)
    try:
        await typed.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
    return sys.stdin.readline()


async def _show(agent: Agent, question: str, temperature: float, logprobs: bool, console: Console) -> None:
    transcript = Transcript(console)
    trajectory = await agent.ask(question, transcript.tell, temperature=temperature)
    transcript.end(trajectory)
    if logprobs:
        transcript.logprobs(trajectory, [agent.token_texts(a.token_ids) for a in trajectory.actions])


async def _as_json(agent: Agent, question: str, temperature: float) -> dict[str, Any]:
    found: list[Retrieved] = []

    def watch(event: Event) -> None:
        if isinstance(event, Retrieved):
            found.append(event)

    trajectory = await agent.ask(question, watch, temperature=temperature)
    return record_of(trajectory, found)


def record_of(trajectory: Trajectory, found: list[Retrieved]) -> dict[str, Any]:
    """A trajectory as `ask --json` prints it. Log-probs are in nats."""
    pair = answer_pair(trajectory)
    segments = []
    for s in trajectory.segments:
        one: dict[str, Any] = {"by": "model" if isinstance(s, Action) else "environment", "text": s.text}
        if isinstance(s, Action):
            one |= {"kind": s.kind, "query": s.query, "logprobs": s.logprobs}
        segments.append(one | {"token_ids": s.token_ids})
    return {
        "question": trajectory.question.text,
        "answer": None if pair is None else pair.content.strip(),
        "finish": trajectory.finish,
        "seconds": trajectory.seconds,
        "prompt_ids": trajectory.prompt_ids,
        "segments": segments,
        "searches": [search_call(i, one) for i, one in enumerate(found, 1)],
    }
