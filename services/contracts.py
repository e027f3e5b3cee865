"""The records that pass between services. Plain Python and NumPy: no torch, no Ray.

Words (they are the field's, see docs/algorithms.md): a *trajectory* is a prompt, then *actions* (runs of
tokens that the model wrote) with *observations* (retrieved text, or the notice after an invalid action)
between them. `action_ids[t]` is the index of the action that token t belongs to, or -1 where the model did
not write it: the action mask is `action_ids >= 0`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from services.worker_state import WorkerState

ActionKind = Literal["search", "answer", "invalid"]
FinishReason = Literal["answer", "turns", "length"]
Reading = Literal["innermost", "search_r1"]
"""How the tags in a model's text are read; see services.rollout.worker.tags."""


@dataclass(frozen=True)
class Question:
    """One row of a data set."""

    id: str
    text: str
    golden_answers: tuple[str, ...]
    data_source: str
    prompt: str | None = None
    """The full user turn, where the data file carries one (Search-R1 parquet); None: the template writes
    it."""
    system: str | None = None
    """The system turn that stands before `prompt` in the data file, if any."""


@dataclass(frozen=True)
class TrajectoryRequest:
    """One trajectory to be sampled. The uid is unique in a run and stays the same when the trajectory is run
    again."""

    uid: str
    group: str
    """Uid of the prompt occurrence: the trajectories of one group share it, and no two occurrences do."""
    question: Question
    seed: int
    temperature: float = 1.0
    """0 is greedy."""
    retriever_url: str | None = None
    """Another retriever than the worker's own (evaluation on another corpus)."""


@dataclass
class Action:
    """One contiguous run of tokens that the model wrote."""

    token_ids: list[int]
    logprobs: list[float]
    """Sampler's log-probs of those tokens in nats, at the sampling temperature."""
    policy_version: int
    """The oldest version of the weights that wrote a token of it."""
    kind: ActionKind
    text: str
    query: str | None = None
    """What was searched for; set only where the search was carried out."""
    document_ids: list[str] | None = None
    """Documents that the search returned, best first; None where none was carried out."""
    thinking: bool = False
    """It began inside a think block that the prompt had opened."""


@dataclass
class Observation:
    """Tokens that the environment wrote."""

    token_ids: list[int]
    text: str


@dataclass
class Trajectory:
    """A finished trajectory. `segments` alternates actions and observations, and ends with an action."""

    uid: str
    group: str
    question: Question
    prompt_ids: list[int]
    segments: list[Action | Observation]
    finish: FinishReason
    worker: str = ""
    seconds: float = 0.0
    reading: Reading = "innermost"
    """How its loop read the tags; rewards read them the same way."""

    @property
    def actions(self) -> list[Action]:
        return [s for s in self.segments if isinstance(s, Action)]

    @property
    def model_text(self) -> str:
        """What the model itself wrote, observations excluded: the only text that a reward may read."""
        return "".join(a.text for a in self.actions)

    @property
    def searches(self) -> int:
        """Searches that were carried out."""
        return sum(a.document_ids is not None for a in self.actions)

    @property
    def policy_version(self) -> int:
        """The oldest version that took part."""
        return min(a.policy_version for a in self.actions)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Whole sequence: token_ids int32 [T], action_ids int16 [T] (-1 outside the mask), sampler log-probs
        float32 [T] (0 outside)."""
        tokens, actions, logps = (
            list(self.prompt_ids),
            [-1] * len(self.prompt_ids),
            [0.0] * len(self.prompt_ids),
        )
        index = 0
        for segment in self.segments:
            n = len(segment.token_ids)
            tokens += segment.token_ids
            if isinstance(segment, Action):
                actions += [index] * n
                logps += segment.logprobs
                index += 1
            else:
                actions += [-1] * n
                logps += [0.0] * n
        return np.asarray(tokens, np.int32), np.asarray(actions, np.int16), np.asarray(logps, np.float32)


@dataclass
class TokenBatch:
    """Trajectories as packed arrays: row b is `[offsets[b], offsets[b + 1])` of each array. Log-probs are in
    nats."""

    uid: list[str]
    offsets: np.ndarray  # int64 [B + 1]
    token_ids: np.ndarray  # int32 [sum T]
    action_ids: np.ndarray  # int16 [sum T]
    logp_sampler: np.ndarray | None = None  # float32 [sum T], 0 outside the mask
    logp_old: np.ndarray | None = None  # float32 [sum T], 0 outside the mask
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    """Further columns, each [B] or [sum T]: `advantages` float32 [B], `answer_mask` bool [sum T], ..."""

    def __len__(self) -> int:
        return len(self.uid)

    @classmethod
    def of(cls, trajectories: list[Trajectory]) -> TokenBatch:
        arrays = [t.arrays() for t in trajectories]
        lengths = [len(a[0]) for a in arrays]
        tokens, actions, logps = (
            np.concatenate(column) if arrays else np.zeros(0, dtype)
            for column, dtype in zip(
                list(zip(*arrays, strict=True)) or [(), (), ()], (np.int32, np.int16, np.float32), strict=True
            )
        )
        return cls(
            [t.uid for t in trajectories], np.cumsum([0, *lengths]), tokens, actions, logp_sampler=logps
        )

    def row(self, b: int) -> slice:
        return slice(int(self.offsets[b]), int(self.offsets[b + 1]))

    def take(self, rows: list[int]) -> TokenBatch:
        """The rows named, in that order."""
        total, lengths = len(self.token_ids), np.diff(self.offsets)[rows]
        index = (
            np.concatenate([np.arange(self.offsets[b], self.offsets[b + 1]) for b in rows])
            if rows
            else np.zeros(0, np.int64)
        )

        def pick(column: np.ndarray | None) -> np.ndarray | None:
            if column is None:
                return None
            return column[index] if len(column) == total else column[rows]

        return TokenBatch(
            [self.uid[b] for b in rows],
            np.cumsum([0, *lengths]),
            self.token_ids[index],
            self.action_ids[index],
            pick(self.logp_sampler),
            pick(self.logp_old),
            {k: pick(v) for k, v in self.extra.items()},
        )


@dataclass(frozen=True)
class WeightUpdate:
    """One version of the weights, on its way to the workers. What `payload` holds is the transport's own
    affair."""

    version: int
    backend: str
    payload: Any
    nbytes: int


@dataclass(frozen=True)
class WeightsReceiver:
    """A rollout worker that is to be given weights."""

    id: str
    ranks: int = 1
    """Processes that hold a part of its model (tensor parallelism)."""
    gpus: float = 0.0
    """GPUs of its own; below `ranks` it has none, or shares them."""


@dataclass(frozen=True)
class WorkerInfo:
    """What a rollout worker says of itself."""

    id: str
    pid: int
    node: str
    policy_version: int
    outstanding_tokens: int = 0
    state: WorkerState = WorkerState.READY
    trajectories: int = 0
    """That it has finished, as its pool counts them."""
    waits_for: str = ""
    """What its searches wait for that take long, in one line; empty where none does."""
    hits_left_out: int = 0
    """Hits of its searches that had no text, and were left out beside others of their query."""
