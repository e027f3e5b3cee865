"""The records that pass between services. Plain Python and NumPy: no torch, no Ray.

Words (they are the field's, see docs/algorithms.md): a *trajectory* is a prompt, then *actions* (runs of
tokens that the model wrote) with *observations* (retrieved text, or the notice after an invalid action)
between them. `action_ids[t]` is the index of the action that token t belongs to, or -1 where the model did
not write it: the action mask is `action_ids >= 0`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from services.common.names import near_name
from services.worker_state import WorkerState

MAX_DOCUMENT_CHARS = 20_000
"""Most characters of a document that a trajectory carries along, for people to read."""
ActionKind = Literal["search", "answer", "tool", "invalid"]
FinishReason = Literal["answer", "turns", "length"]
Reading = Literal["innermost", "search_r1"]
"""How the tags in a model's text are read; see services.rollout.worker.tags."""


class Span(NamedTuple):
    """A piece of time. Seconds of CLOCK_MONOTONIC of the host that measured it."""

    name: str
    began: float
    seconds: float


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
    context: tuple[str, ...] = ()
    """Passages that were retrieved for it beforehand, best first; templates of agents show none."""
    _kept: str = field(default="", compare=False, repr=False)
    """JSON of the row's other columns, and of why some of them are not kept: small where there are many
    questions, and nobody's changes reach another trajectory."""

    @property
    def columns(self) -> RowColumns:
        """The other columns of its row, by their names in the file. A copy of the caller's own."""
        columns, left_out = json.loads(self._kept) if self._kept else ({}, {})
        return RowColumns(columns, self.id, left_out)


class NoColumn(KeyError):
    """A column that a question's row lacks, or that is not kept."""

    def __str__(self) -> str:  # KeyError shows its message in quotes
        return str(self.args[0])


class RowColumns(dict[str, Any]):
    """Columns of a question's row. One that is asked for and not there raises a KeyError that says why."""

    def __init__(self, columns: Mapping[str, Any], question: str, left_out: Mapping[str, str]) -> None:
        super().__init__(columns)
        self.question = question
        self.left_out = left_out
        """Why columns of the row are not here, by their names."""

    def __missing__(self, name: str) -> Any:
        if why := self.left_out.get(name):
            raise NoColumn(f"column `{name}` of question {self.question} is not kept: {why}")
        has = ", ".join(map(str, self)) or "none"
        raise NoColumn(
            f"question {self.question} has no other column `{name}`; its columns are {has}"
            f"{near_name(str(name), [*self, *self.left_out])}"
        )


def kept(columns: Mapping[str, str], left_out: Mapping[str, str] | None = None) -> str:
    """What a question keeps of columns, each given as JSON. left_out: why others are not kept, by their
    names."""
    if not columns and not left_out:
        return ""
    texts = ", ".join(f"{json.dumps(name)}: {text}" for name, text in columns.items())
    return f"[{{{texts}}}, {json.dumps(left_out or {})}]"


def with_columns(question: Question, columns: Mapping[str, Any]) -> Question:
    """The question with other columns of its row, which must be what JSON can say."""
    return replace(question, _kept=kept({name: json.dumps(value) for name, value in columns.items()}))


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
    """What was searched for, or asked of the tool; set only where that was carried out."""
    document_ids: list[str] | None = None
    """Documents that the search returned, best first; None where none was carried out."""
    thinking: bool = False
    """It began inside a think block that the prompt had opened."""
    documents: list[str] | None = field(default=None, compare=False)
    """Texts of those documents as the search returned them, cut at MAX_DOCUMENT_CHARS."""
    seconds: float | None = field(default=None, compare=False)
    """Duration of its generation."""
    search_seconds: float | None = field(default=None, compare=False)
    """Duration of its search or its call of a tool; None where none was carried out."""
    search_failures: int = 0
    """Tries of its search that failed before it was answered."""
    tool: str | None = None
    """Name of the tool of an action of kind `tool`."""


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
    one_sequence: bool = True
    """Whether each action was sampled after all of what stands before it. False where later turns were shown
    without the thoughts of earlier ones."""
    spans: list[Span] = field(default_factory=list, compare=False, repr=False)
    """By the worker's clock: the whole trajectory, then its generations and searches in order."""
    round_trip: tuple[float, float] | None = field(default=None, compare=False, repr=False)
    """When the driver sent its request, and when it had it, by the driver's clock (monotonic)."""

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
        float32 [T] (0 outside). Raises ValueError where it is no one sequence."""
        if not self.one_sequence:
            raise ValueError(f"trajectory {self.uid}: its turns were sampled in contexts of their own")
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
    """Trajectories as packed arrays. Row b is `[offsets[b], offsets[b + 1])` of each array of tokens.
    Log-probs are in nats; `sum T` is the number of tokens of all rows."""

    ROW_COLUMNS: ClassVar[tuple[str, ...]] = ("advantages", "right", "step")
    """Fields with one value per trajectory."""
    TOKEN_COLUMNS: ClassVar[tuple[str, ...]] = ("token_ids", "action_ids", "logp_sampler", "logp_old")
    """Fields with one value per token."""

    uid: list[str]
    """Uid of each trajectory, [B]."""
    offsets: np.ndarray
    """Where the rows begin and end: int64 [B + 1], from 0 to sum T."""
    token_ids: np.ndarray
    """int32 [sum T]."""
    action_ids: np.ndarray
    """Index of each token's action in its trajectory: int16 [sum T], -1 outside the action mask."""
    logp_sampler: np.ndarray | None = None
    """Log-probs of the engine that sampled: float32 [sum T], 0 outside the mask."""
    logp_old: np.ndarray | None = None
    """Log-probs of the learner before its update: float32 [sum T], 0 outside the mask."""
    advantages: np.ndarray | None = None
    """float32 [B]. None where they are not known."""
    right: np.ndarray | None = None
    """Whether the reward function calls the answer right (`services.likelihood.metrics.verdicts`): bool [B].
    None where it is not known."""
    step: np.ndarray | None = None
    """The step that sampled each trajectory: int64 [B]. Set only in the frozen set of the fixed probe."""

    def __len__(self) -> int:
        return len(self.uid)

    @classmethod
    def of(cls, trajectories: list[Trajectory]) -> TokenBatch:
        """The token arrays of trajectories, with the sampler's log-probs."""
        arrays = [t.arrays() for t in trajectories]
        offsets = np.cumsum([0, *(len(tokens) for tokens, _, _ in arrays)])
        # The empty array in front gives a batch of no trajectories its dtype.
        return TokenBatch(
            [t.uid for t in trajectories],
            offsets,
            np.concatenate([np.zeros(0, np.int32), *(tokens for tokens, _, _ in arrays)]),
            np.concatenate([np.zeros(0, np.int16), *(actions for _, actions, _ in arrays)]),
            logp_sampler=np.concatenate([np.zeros(0, np.float32), *(logps for _, _, logps in arrays)]),
        )

    @classmethod
    def joined(cls, batches: Sequence[TokenBatch]) -> TokenBatch:
        """The rows of one or more batches, one after another. Of the optional fields those are kept that all
        batches have, except for the sampler's log-probs, which nobody compares across batches."""

        def column(name: str) -> np.ndarray | None:
            parts = [getattr(batch, name) for batch in batches]
            return None if any(part is None for part in parts) else np.concatenate(parts)

        return TokenBatch(
            [uid for batch in batches for uid in batch.uid],
            np.cumsum([0, *(n for batch in batches for n in np.diff(batch.offsets))]),
            np.concatenate([batch.token_ids for batch in batches]),
            np.concatenate([batch.action_ids for batch in batches]),
            logp_old=column("logp_old"),
            advantages=column("advantages"),
            right=column("right"),
            step=column("step"),
        )

    def row(self, b: int) -> slice:
        """The place of row b in the arrays of tokens."""
        return slice(int(self.offsets[b]), int(self.offsets[b + 1]))

    def columns(self) -> dict[str, np.ndarray]:
        """Every array that is set, but `offsets`, by the name of its field."""
        found = {name: getattr(self, name) for name in (*self.TOKEN_COLUMNS, *self.ROW_COLUMNS)}
        return {name: column for name, column in found.items() if column is not None}

    def take(self, rows: list[int]) -> Self:
        """The rows named, in that order, with all their columns."""
        places = [np.arange(self.offsets[b], self.offsets[b + 1]) for b in rows]
        tokens = np.concatenate([np.zeros(0, np.int64), *places])
        picked = {
            name: column[tokens if name in self.TOKEN_COLUMNS else rows]
            for name, column in self.columns().items()
        }
        offsets = np.cumsum([0, *np.diff(self.offsets)[rows]])
        return replace(self, uid=[self.uid[b] for b in rows], offsets=offsets, **picked)


@dataclass(kw_only=True)
class TrainBatch(TokenBatch):
    """What the learner trains on: token arrays, and what its losses need to know of each trajectory."""

    ROW_COLUMNS: ClassVar[tuple[str, ...]] = (*TokenBatch.ROW_COLUMNS, "preserved", "valid")
    TOKEN_COLUMNS: ClassVar[tuple[str, ...]] = (*TokenBatch.TOKEN_COLUMNS, "answer_mask")

    advantages: np.ndarray
    """float32 [B]."""
    preserved: np.ndarray
    """The trajectories whose likelihood LLDS preserves: bool [B]."""
    valid: np.ndarray
    """bool [B]. A row that is not valid is scored, and takes no part in any loss or count."""
    answer_mask: np.ndarray | None = None
    """The tokens of the answer span: bool [sum T]. None: LLDS weighs all tokens alike."""

    @classmethod
    def of_tokens(
        cls,
        tokens: TokenBatch,
        *,
        advantages: np.ndarray,
        preserved: np.ndarray,
        valid: np.ndarray,
        right: np.ndarray | None = None,
        answer_mask: np.ndarray | None = None,
    ) -> TrainBatch:
        """Token arrays with the learner's columns; for their shapes see the fields."""
        return TrainBatch(
            tokens.uid,
            tokens.offsets,
            tokens.token_ids,
            tokens.action_ids,
            logp_sampler=tokens.logp_sampler,
            logp_old=tokens.logp_old,
            advantages=advantages,
            preserved=preserved,
            valid=valid,
            right=right,
            answer_mask=answer_mask,
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
    """What it waits for while it starts, later what its searches wait for that take long, in one line; empty
    where nothing does."""
    hits_left_out: int = 0
    """Hits of its searches that had no text, and were left out beside others of their query."""
    gpu_ids: str = ""
    """The GPUs of its node that it sees, as Ray names them in CUDA_VISIBLE_DEVICES."""
