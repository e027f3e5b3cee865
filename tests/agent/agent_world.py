"""An agent without an engine, which tells and returns one fixed trajectory; and a served agent on a tiny
model."""

from __future__ import annotations

import asyncio

from retriever_service.client import Hit
from services.agent.agent import AgentSpec
from services.contracts import Action, Observation, Question, Trajectory
from services.rollout.worker.watching import Observed, Retrieved, Searching, Writing
from services.settings import RolloutSettings

QUESTION = "what is the river of n3 ?"
"""For the policy that searches (conftest.py)."""
NAME = "still/step_000001"
FIRST = "<think> who </think> <search> Hamlet </search>"
LAST = "<think> found </think> <answer> Shakespeare </answer>"
HITS = [Hit("d1", '"Hamlet"\na play by <b>Shakespeare</b>', 2.5)]
CHAT = b'{"model": "still/step_000001", "messages": [{"role": "user", "content": "who wrote Hamlet?"}]}'


class StillAgent:
    """Answers every question alike. `hold` keeps questions from ending, `fault` is raised in place of an
    answer."""

    def __init__(self) -> None:
        self.running = 0
        self.closed = False
        self.reset()

    def reset(self) -> None:
        self.hold: asyncio.Event | None = None
        self.fault: Exception | None = None
        self.asked: list[tuple[str, float, int | None]] = []

    async def start(self) -> None:
        pass

    def check(self) -> None:
        pass

    async def close(self) -> None:
        self.closed = True

    def token_texts(self, token_ids: list[int]) -> list[str]:
        return [f" t{i}" for i in token_ids]

    async def ask(self, question, watch, *, temperature=0.0, most_tokens=None):
        self.asked.append((question, temperature, most_tokens))
        self.running += 1
        try:
            return await self._answer(question, watch)
        finally:
            self.running -= 1

    async def _answer(self, question, watch):
        for end in (9, len(FIRST)):
            watch(Writing(FIRST[:end]))
        if self.hold is not None:
            await self.hold.wait()
        if self.fault is not None:
            raise self.fault
        watch(Searching("Hamlet"))
        watch(Retrieved("Hamlet", HITS, 0.25))
        watch(Observed("<information> a play </information>"))
        for end in (3, 27, 29, len(LAST)):
            watch(Writing(LAST[:end]))
        segments = [
            Action([1, 2], [-0.5, -0.25], 0, "search", FIRST, query="Hamlet", document_ids=["d1"]),
            Observation([3, 4, 5], "<information> a play </information>"),
            Action([6], [-0.125], 0, "answer", LAST),
        ]
        asked = Question("ask-1", question, (), "ask")
        return Trajectory("ask-1", "ask-1", asked, [7, 8], segments, "answer", seconds=1.5)


def spec_of(model: str, url: str, **settings) -> AgentSpec:
    """An agent on plain transformers, so that a test starts in a second."""
    tiny = {"max_model_tokens": 128, "max_response_tokens": 24, "max_turns": 2, "topk": 1}
    return AgentSpec(
        "tiny",
        model,
        url,
        settings=RolloutSettings(engine="transformers", template="lab", **(tiny | settings)),
    )
