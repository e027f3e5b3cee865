"""A trained agent to talk to: one rollout worker in this process, without Ray. Loop, template and engine are
those of training."""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass, field
from typing import Protocol

from services.common.deadlines import within
from services.common.errors import EnvironmentLacks
from services.contracts import Question, Trajectory, TrajectoryRequest
from services.rollout.worker.watching import Watch, token_texts
from services.rollout.worker.worker import RolloutWorker
from services.settings import RolloutSettings


@dataclass(frozen=True)
class Curves:
    """Where the curves of a model's run are to be seen."""

    url: str | None
    """Of a page, where a service is known that has them."""
    command: str | None
    """That shows them, where none is."""


@dataclass(frozen=True)
class AgentSpec:
    """What an agent is made of."""

    name: str
    """The name that it is asked by, such as that of its run."""
    model_path: str
    """Folder of the weights, in Hugging Face form."""
    retriever_url: str
    retriever_timeout_seconds: float = 60.0
    settings: RolloutSettings = field(default_factory=RolloutSettings)
    """Template, turns, lengths and engine, as in training."""
    seed: int = 0
    curves: Curves | None = None


class Asked(Protocol):
    """Whoever answers questions."""

    async def ask(
        self, question: str, watch: Watch, *, temperature: float = 0.0, most_tokens: int | None = None
    ) -> Trajectory:
        """One trajectory; `watch` is told of it as it happens. Temperature 0 is greedy. most_tokens: after
        the prompt, documents included."""
        ...

    def token_texts(self, token_ids: list[int]) -> list[str]:
        """The text of each token; joined they are that of the ids."""
        ...

    async def start(self) -> None:
        """Get ready to answer."""
        ...

    def check(self) -> None:
        """Raises WorkerLostError where nothing will be answered any more."""
        ...

    async def close(self) -> None:
        """Give back what is held. May be called again."""
        ...


class Agent:
    """`start` first; then any number of questions at the same time. Each stands alone: the policy was trained
    on single questions, and knows of no earlier one."""

    def __init__(self, spec: AgentSpec) -> None:
        self.spec = spec
        self.ready = False
        """Whether the model is loaded."""
        self._numbers = itertools.count(1)
        self._worker = RolloutWorker(
            "agent",
            spec.settings,
            model_path=spec.model_path,
            retriever_url=spec.retriever_url,
            retriever_timeout_seconds=spec.retriever_timeout_seconds,
            seed=spec.seed,
        )

    async def start(self) -> None:
        """Load the model; takes seconds to a minute. Raises UserError, EnvironmentLacks."""
        # Of vLLM's process groups, which ask nobody for a token: on no other network than this machine's.
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
        seconds = self.spec.settings.start_timeout_seconds
        late = f"the engine did not start within rollout.start_timeout_seconds={seconds:g}"
        async with within(seconds, lambda: EnvironmentLacks(late)):
            await self._worker.start()
        self.ready = True

    async def ask(
        self, question: str, watch: Watch, *, temperature: float = 0.0, most_tokens: int | None = None
    ) -> Trajectory:
        """As of `Asked`. Raises UserError, TimeoutError, RetrieverUnavailable, and what
        the engine raises."""
        uid = f"ask-{next(self._numbers):06d}"
        asked = Question(uid, question, (), "ask")
        request = TrajectoryRequest(uid, uid, asked, self.spec.seed, temperature)
        return await self._worker.watched(request, watch, most_tokens=most_tokens)

    def token_texts(self, token_ids: list[int]) -> list[str]:
        """As of `Asked`."""
        return token_texts(token_ids, self._worker.template.decode)

    def check(self) -> None:
        """As of `Asked`."""
        self._worker.info()

    async def close(self) -> None:
        """End the engine and its processes."""
        await self._worker.close()
