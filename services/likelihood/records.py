"""What the likelihood service accepts and gives back, as REST records.

A *step record* is one training step of anybody's trainer: metrics by name and, for each trajectory, its actions with their
log-probs before and after the update. Log-probs are sums over the tokens of an action, in nats, so they are at most 0.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from services.common.http.errors import OneLineError

MAX_STEP = 1_000_000
"""A curve is held densely, 8 bytes a step: one post of a far-off step must not cost gigabytes."""
MAX_COUNT = 2**31 - 1
MAX_METRICS = 2000
MAX_TRAJECTORIES = 50_000
MAX_ACTIONS = 1000
MAX_DOCUMENTS = 1000
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ROUNDING = 1e-3  # a sum of log-probs near 0 may come out a little above it


class LikelihoodError(OneLineError):
    """A mistake in what the likelihood service, its store or its commands are given."""


def check_run_name(run: str) -> str:
    """The name itself. Raises LikelihoodError unless it is letters, digits, dot, dash and underscore, 128 at most."""
    if not RUN_NAME.fullmatch(run):
        raise LikelihoodError(
            f"run {run[:140]!r}: expected 1 to 128 letters, digits, '.', '-' or '_', the first a letter or digit"
        )
    return run


def _log_prob(value: float) -> float:
    if not -math.inf < value <= _ROUNDING:
        raise ValueError("expected a finite log-prob <= 0 (summed over the action's tokens, in nats)")
    return value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("expected a finite number")
    return value


def _metrics(values: dict[str, float | None]) -> dict[str, float | None]:
    if len(values) > MAX_METRICS:
        raise ValueError(f"{len(values)} metrics; at most {MAX_METRICS} a step")
    for name in values:
        if not 0 < len(name) <= 200 or not name.isprintable():
            raise ValueError(f"metric name {name[:40]!r}: expected 1 to 200 printable characters")
    return {k: v if v is not None and math.isfinite(v) else None for k, v in values.items()}


LogProb = Annotated[float, AfterValidator(_log_prob)]
Finite = Annotated[float, AfterValidator(_finite)]


class Record(BaseModel):
    """Unknown keys are refused, so that a misspelt one is not lost in silence."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ActionRecord(Record):
    """One contiguous run of tokens that the model wrote."""

    tokens: int = Field(ge=0, le=MAX_COUNT)
    """Tokens of the action."""
    logp_before: LogProb
    """Summed log-prob under the weights before the update, in nats."""
    logp_after: LogProb | None = None
    """The same after the update; null where it was not scored again."""
    documents: list[str] | None = Field(None, max_length=MAX_DOCUMENTS)
    """Ids of the documents that its search returned, best first; null where it did not search."""


class TrajectoryRecord(Record):
    """One sampled trajectory."""

    uid: str = Field(min_length=1, max_length=200)
    """Unique in the run; the same uid posted twice for a step and attempt is stored once."""
    group: str = Field(min_length=1, max_length=200)
    """Shared by the samples of one prompt occurrence."""
    reward: Finite | None = None
    """Null where it is not known; with an advantage of 0 the trajectory is then in no likelihood metric."""
    advantage: Finite
    right: bool | None = None
    """Whether the reward function calls its answer right; null: a reward of at least 1."""
    tool_rounds: int = Field(0, ge=0, le=MAX_COUNT)
    """Searches (or other tool calls) that were carried out."""
    actions: list[ActionRecord] = Field(max_length=MAX_ACTIONS)


class StepRecord(Record):
    """One training step. Several posts of the same step and attempt are merged (data-parallel ranks may post their own part)."""

    step: int = Field(ge=0, le=MAX_STEP)
    attempt: int = Field(0, ge=0, le=MAX_COUNT)
    """0, and one more each time the run is resumed: it supersedes all steps of lower attempts from its own first step on."""
    policy_version: int | None = Field(None, ge=0, le=MAX_COUNT)
    """Version of the weights that the step started from."""
    metrics: Annotated[dict[str, float | None], AfterValidator(_metrics)] = Field(default_factory=dict)
    """By name. A value that is not finite is stored as null."""
    trajectories: list[TrajectoryRecord] = Field(default_factory=list, max_length=MAX_TRAJECTORIES)


class EventRecord(Record):
    """Something that happened in a run: a worker lost, an action of the monitor, a resume."""

    step: int = Field(ge=0, le=MAX_STEP)
    kind: str = Field(min_length=1, max_length=100)
    text: str = Field(max_length=2000)
    """One line for people."""
    data: dict[str, Any] = Field(default_factory=dict)


class StepReceipt(Record):
    """What became of a posted step."""

    run: str
    step: int
    attempt: int
    stored: int
    """Trajectories that were new."""
    superseded: int = 0
    """Stored steps of lower attempts that this post replaced."""


class RunInfo(Record):
    """A run, as the list of runs shows it."""

    run: str
    created: float
    """Unix seconds of the first post."""
    updated: float
    """Unix seconds of the latest post."""
    attempt: int
    """Highest attempt."""
    first_step: int | None
    last_step: int | None
    steps: int
    trajectories: int


class StoredStep(Record):
    """A step as the store holds it, without its trajectories."""

    step: int
    attempt: int
    policy_version: int | None
    time: float
    metrics: dict[str, float | None]
    trajectories: int


def one_line(error: ValidationError) -> str:
    """The first mistake, as `trajectories.3.actions.0.logp_before: what is accepted (got ...)`."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    given = first.get("input")
    if first["type"] == "extra_forbidden":
        return f"{key}: unknown key"
    if first["type"] == "missing":
        return f"{key}: required, and not given"
    if first["type"] == "json_invalid":
        return f"body: not JSON ({first['ctx']['error']})"
    message = first["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(given, dict | list | BaseModel) else f" (got {str(given)[:60]})"
    more = error.error_count() - 1
    return f"{key or 'body'}: {message}{shown}" + (f"; {more} more of the kind" if more else "")
