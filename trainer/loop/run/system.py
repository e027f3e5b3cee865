"""What the loop works with: everything that a run needs, started by the session and handed over as one
object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from services.contracts import Question
from services.likelihood.client import LikelihoodClient
from services.rollout.pool.pool import RolloutPool
from trainer.config.schema import Config
from trainer.data import PromptCursor
from trainer.learner.group import LearnerGroup
from trainer.loop.run.run_folder import RunFolder
from trainer.rewards import Reward


class StopRequests(Protocol):
    """Whoever may ask the loop to end: signals, or a test."""

    @property
    def requested(self) -> bool:
        """Whether no further step should begin."""

    def step_in_hand(self) -> AbstractContextManager[None]:
        """Inside, a first request waits for the end of the step."""

    def saving(self) -> AbstractContextManager[None]:
        """Inside, a first request waits for the end of the checkpoint."""

    def abort(self, error: Exception) -> None:
        """End the run at once; it leaves with `error`."""


@dataclass
class Serving:
    """What sampling needs: a tokenizer, retrievers, and a pool that is not started yet."""

    tokenizer: Any
    eval_questions: list[Question]
    retriever_url: str
    eval_retriever_url: str | None
    pool: RolloutPool


@dataclass
class System(Serving):
    """Everything that training needs, started."""

    config: Config
    folder: RunFolder
    cursor: PromptCursor
    store: LikelihoodClient
    learner: LearnerGroup
    reward: Reward
    metrics: Mapping[str, Callable[..., Any]]
    """The functions of `trainer.metrics`, by their paths."""
    identity: dict[str, Any]
    """What each checkpoint keeps of the run: `trainer.session.resuming.rules.identity_of`."""
