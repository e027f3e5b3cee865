"""A trajectory token by token: what the microscope stores, and what any trainer may post.

The text of a trajectory is the text of its segments, one after another. A segment that the model wrote is
inside the action mask, and has its tokens as strings and a log-prob of each before and after the update; a
segment of the environment is outside. Log-probs are in nats.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, model_validator

from services.likelihood.records import MAX_ACTIONS, MAX_COUNT, MAX_DOCUMENTS, MAX_TRAJECTORIES, Record

MAX_TEXT = 4 << 20
"""Most characters of a text, a token's included."""
MAX_TOKENS = 1_000_000
"""Most tokens of a segment."""
MAX_GOLDEN = 1000
_ROUNDING = 1e-3

Text = Annotated[str, Field(max_length=MAX_TEXT)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Seconds = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
TokenLogProb = Annotated[float, Field(strict=True, allow_inf_nan=False, le=_ROUNDING)]
LogProbs = Annotated[list[TokenLogProb], Field(max_length=MAX_TOKENS, fail_fast=True)]


class Document(Record):
    """One document that a search returned."""

    id: Name
    title: Text | None = None
    """Its first line, where the retriever gave its text."""
    text: Text | None = None
    """The rest; null where the trainer does not keep it."""


class Written(Record):
    """One action: tokens that the model wrote."""

    by: Literal["model"]
    kind: Literal["search", "answer", "tool", "invalid"] | None = None
    """What the action did; null where the trainer does not say."""
    tokens: list[Text] = Field(max_length=MAX_TOKENS, fail_fast=True)
    """The tokens as strings. Together they are the text: of a character that several tokens spell, the last
    one holds it, and the others are empty."""
    logp_before: LogProbs
    """Log-prob of each token under the weights before the update."""
    logp_after: LogProbs | None = None
    """The same after the update; null where it was not scored again."""
    logp_sampler: LogProbs | None = None
    """The same, of the engine that sampled."""
    held: list[Count] | None = Field(None, max_length=MAX_TOKENS, fail_fast=True)
    """Indexes of the tokens on which LLDS's gate is open: those that it pulls back up. Null where LLDS is
    off."""
    policy_version: Count | None = None
    """The oldest version of the weights that wrote a token of it."""
    query: Text | None = None
    """What was searched for."""
    documents: list[Document] | None = Field(None, max_length=MAX_DOCUMENTS, fail_fast=True)
    """What the search returned, best first; null where none was carried out."""
    seconds: Seconds | None = None
    """Duration of the generation."""
    search_seconds: Seconds | None = None
    """Duration of the search."""

    @model_validator(mode="after")
    def _as_many_as_tokens(self) -> Self:
        for name in ("logp_before", "logp_after", "logp_sampler"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.tokens):
                raise ValueError(f"{name}: {len(values)} values for {len(self.tokens)} tokens")
        if self.held and max(self.held) >= len(self.tokens):
            raise ValueError(f"held: index {max(self.held)} of {len(self.tokens)} tokens")
        return self


class Observed(Record):
    """What the environment wrote between two actions: retrieved text, or a notice."""

    by: Literal["environment"]
    text: Text
    tokens: Count | None = None
    """How many tokens it has."""


class GoldenAnswer(Record):
    """One accepted answer."""

    text: Text
    normalized: Text | None = None
    """As the reward compares it."""
    equal: StrictBool | None = None
    """Whether the trajectory's answer is the same."""


class Scoring(Record):
    """Why a trajectory earned its reward."""

    function: str | None = Field(None, max_length=200)
    """The reward function's name."""
    answer: Text | None = None
    """The answer that was scored; null where the model wrote none."""
    normalized: Text | None = None
    """The same, as the reward compares it."""
    golden: list[GoldenAnswer] = Field(default_factory=list, max_length=MAX_GOLDEN, fail_fast=True)
    """The accepted answers."""


class SampledTrajectory(Record):
    """One trajectory of a step's sample, token by token."""

    uid: Name
    """Unique in the run; the same uid posted twice for a step and attempt is stored once."""
    group: Name
    """Shared by the samples of one prompt occurrence."""
    question: Text | None = None
    data_source: str | None = Field(None, max_length=200)
    prompt: Text | None = None
    """What the model was shown before its first token."""
    reward: Number | None = None
    """Null where it is not known."""
    right: StrictBool | None = None
    """Whether the reward function calls its answer right; null: a reward of at least 1."""
    advantage: Number
    scoring: Scoring | None = None
    preserved: StrictBool | None = None
    """Whether LLDS preserves this trajectory, so that it may act on its tokens; null where LLDS is off."""
    finish: Literal["answer", "turns", "length"] | None = None
    """How it ended: with an answer, at the limit of turns, or at the limit of tokens."""
    valid: StrictBool | None = None
    """Whether every action searched or answered."""
    policy_version: Count | None = None
    """The oldest version of the weights that took part."""
    worker: str | None = Field(None, max_length=200)
    seconds: Seconds | None = None
    """Duration of the whole trajectory."""
    probe: StrictBool | None = None
    """True for a trajectory of an earlier step that was scored again at this one. `logp_before` is then what
    its tokens had when it was sampled, `logp_after` what they have after this step's update. It is shown
    through time, and not among the groups of the step."""
    segments: list[Annotated[Written | Observed, Field(discriminator="by")]] = Field(
        max_length=2 * MAX_ACTIONS, fail_fast=True
    )

    @property
    def truncated(self) -> bool:
        """Whether it was cut off at the limit of tokens."""
        return self.finish == "length"

    @property
    def written(self) -> list[Written]:
        """The segments inside the action mask."""
        return [segment for segment in self.segments if isinstance(segment, Written)]


class SamplesRecord(Record):
    """Trajectories of one step, token by token. Several posts of the same step and attempt are merged."""

    attempt: Count = 0
    """As that of the step."""
    trajectories: list[SampledTrajectory] = Field(max_length=MAX_TRAJECTORIES, fail_fast=True)


class SamplesReceipt(Record):
    """What became of posted trajectories."""

    run: str
    step: int
    attempt: int
    stored: int
    """Trajectories that were new."""
    kept_steps: int
    """Steps of which the store keeps them."""
