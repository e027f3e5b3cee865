"""What the likelihood service accepts and gives back, as REST records.

A *step record* is one training step of anybody's trainer: metrics by name and, for each trajectory, its
actions with their log-probs before and after the update. Log-probs are sums over the tokens of an action, in
nats, so they are at most 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, ValidationError
from pydantic_core import from_json

from services.common.errors import UserError
from services.common.names import accepted
from services.common.printing.messages import said
from services.common.validation import fitting

MAX_STEP = 1_000_000
"""A curve is held densely, 8 bytes per step: one post of a far-off step must not cost gigabytes."""
MAX_COUNT = 2**31 - 1
MAX_METRICS = 2000
MAX_TRAJECTORIES = 50_000
MAX_ACTIONS = 1000
MAX_DOCUMENTS = 1000
NUMBERS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        (
            "step",
            "attempt",
            "policy_version",
            "advantage",
            "tool_rounds",
            "tokens",
            "logp_before",
            "logp_after",
            "steps",
            "started",
            "ended",
            "exit",
        ),
        (bool, str),
    ),
    "reward": (str,),
}
"""Types that are not taken for a number, by key. A reward and a metric may be true or false; text is never a
number."""
MAX_KEYS = 64
"""Most keys of one object, beside the metrics: a mistake is kept for each wrong one until all are read."""
MAX_INTEGER = 2**63 - 1
MAX_DATA_DEPTH = 32
RUN_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
RUN_NAME = re.compile(RUN_PATTERN)
METRIC_PATTERN = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]{1,200}$"
METRIC_NAME = re.compile(METRIC_PATTERN)
_ROUNDING = 1e-3  # a sum of log-probs near 0 may come out a little above it


def check_run_name(run: str) -> str:
    """The name itself. Raises UserError unless it is letters, digits, dot, dash and underscore, 128 at
    most."""
    if not RUN_NAME.fullmatch(run):
        raise UserError(
            f"run {run[:140]!r}: expected 1 to 128 letters, digits, '.', '-' or '_', the first a letter or "
            "digit"
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
        raise ValueError(f"{len(values)} metrics; at most {MAX_METRICS} per step")
    for name in values:
        if not METRIC_NAME.fullmatch(name):
            raise ValueError(f"metric name {name[:40]!r}: expected 1 to 200 printable characters")
    return {k: v if v is not None and math.isfinite(v) else None for k, v in values.items()}


def json_data(values: dict[str, Any]) -> dict[str, Any]:
    """Refuse what a store could not write as JSON."""
    waiting: list[tuple[Any, int]] = [(values, 0)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, int) and not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise ValueError(f"integer of {value.bit_length()} bits; at most 64 bits accepted")
        if isinstance(value, dict | list):
            if depth == MAX_DATA_DEPTH:
                raise ValueError(f"nested too deep; at most {MAX_DATA_DEPTH} levels accepted")
            inside = value.values() if isinstance(value, dict) else value
            waiting += [(one, depth + 1) for one in inside]
    return values


LogProb = Annotated[float, AfterValidator(_log_prob), Field(json_schema_extra={"maximum": _ROUNDING})]
Finite = Annotated[float, AfterValidator(_finite)]


class Record(BaseModel):
    """Unknown keys are refused, so that a misspelt one is not lost in silence."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ActionRecord(Record):
    """One contiguous run of tokens that the model wrote."""

    tokens: int = Field(ge=0, le=MAX_COUNT)
    """Number of tokens in the action."""
    logp_before: LogProb
    """The action's summed log-prob under the weights before the update, in nats."""
    logp_after: LogProb | None = None
    """The action's summed log-prob after the update, in nats. It is null where the action was not scored
    again."""
    documents: list[str] | None = Field(None, max_length=MAX_DOCUMENTS, fail_fast=True)
    """The ids of the documents that its search returned, best first. It is null where the action did not
    search."""


class TrajectoryRecord(Record):
    """One sampled trajectory."""

    uid: str = Field(min_length=1, max_length=200)
    """The trajectory's name, unique in the run. The same uid posted twice for a step and attempt is stored
    once."""
    group: str = Field(min_length=1, max_length=200)
    """The name that the samples of one prompt share. A prompt that comes again has another group."""
    reward: Finite | None = Field(
        None, json_schema_extra={"anyOf": [{"type": "number"}, {"type": "boolean"}, {"type": "null"}]}
    )
    """The reward; true and false count as 1 and 0. It is null where it is not known: a trajectory of
    advantage 0 is then in no likelihood metric."""
    advantage: Finite
    """The advantage that the losses used."""
    right: StrictBool | None = None
    """Whether the reward function calls the answer right. Where it is null, a reward of at least 1 is
    right."""
    tool_rounds: int = Field(0, ge=0, le=MAX_COUNT)
    """Number of searches (or other tool calls) that were carried out."""
    actions: list[ActionRecord] = Field(max_length=MAX_ACTIONS, fail_fast=True)


class StepRecord(Record):
    """One training step. Several posts of the same step and attempt are merged (data-parallel ranks may post
    their own part)."""

    step: int = Field(ge=0, le=MAX_STEP)
    attempt: int = Field(0, ge=0, le=MAX_COUNT)
    """0 at first, and one more each time the run is resumed. An attempt supersedes all steps of lower
    attempts from its own first step on."""
    policy_version: int | None = Field(None, ge=0, le=MAX_COUNT)
    """The version of the weights that the step started from."""
    metrics: Annotated[dict[str, float | None], AfterValidator(_metrics)] = Field(
        default_factory=dict,
        json_schema_extra={
            "maxProperties": MAX_METRICS,
            "propertyNames": {"pattern": METRIC_PATTERN},
            "additionalProperties": {"type": ["number", "boolean", "null"]},
        },
    )
    """The metrics by name. A value that is not finite is stored as null."""
    trajectories: list[TrajectoryRecord] = Field(
        default_factory=list, max_length=MAX_TRAJECTORIES, fail_fast=True
    )


class EventRecord(Record):
    """Something that happened in a run: a worker lost, an action of the monitor, a resume."""

    step: int = Field(ge=0, le=MAX_STEP)
    kind: str = Field(min_length=1, max_length=100)
    text: str = Field(max_length=2000)
    """One line for people."""
    data: Annotated[dict[str, Any], AfterValidator(json_data)] = Field(default_factory=dict)
    """Further facts about the event. Integers have at most 64 bits."""


class StepReceipt(Record):
    """What became of a posted step."""

    run: str
    step: int
    attempt: int
    stored: int
    """Number of trajectories that were new."""
    superseded: int = 0
    """Number of stored steps of lower attempts that this post replaced."""


class RunInfo(Record):
    """A run, as the list of runs shows it."""

    run: str
    created: float
    """Unix seconds of the first post."""
    updated: float
    """Unix seconds of the latest post."""
    attempt: int
    """The highest attempt that posted a step."""
    first_step: int | None
    last_step: int | None
    steps: int
    trajectories: int
    title: str | None = None
    """The name that people gave it."""
    tags: list[str] = Field(default_factory=list)
    hidden: bool = False
    """Whether the page leaves it out of its list."""


class StoredStep(Record):
    """A step as the store holds it, without its trajectories."""

    step: int
    attempt: int
    policy_version: int | None
    time: float
    metrics: dict[str, float | None]
    trajectories: int


R = TypeVar("R", bound=Record)


def parsed(model: type[R], body: bytes) -> R:
    """The record in a body. Raises UserError for what is not JSON, and for the first value that is not
    accepted.

    The objects' sizes are looked at first: a mistake is kept for each wrong key, so that a few megabytes of
    them would cost gigabytes.
    """
    try:
        raw = from_json(body)
    except ValueError as e:
        raise UserError(f"body: not JSON ({e})") from e
    _check_shape(raw)

    def refused(mistakes: ValidationError) -> UserError:
        place = _first_of(mistakes)["loc"][:-1]
        return UserError(one_line(mistakes, _keys_at(model, place)))

    with fitting(refused):
        return model.model_validate(raw)


def _keys_at(model: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """The keys of the record at a place in another one; none where it is no record."""
    found: type[BaseModel] | None = model
    for name in (part for part in place if isinstance(part, str)):
        field = found.model_fields.get(name) if found else None
        found = _record_in(field.annotation) if field else None
    return [*found.model_fields] if found else []


def _record_in(annotation: Any) -> type[BaseModel] | None:
    """The record of a type such as `list[ActionRecord] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((one for part in get_args(annotation) if (one := _record_in(part))), None)


def _check_shape(raw: Any) -> None:
    if not isinstance(raw, dict):
        return  # refused by its kind
    metrics = raw.get("metrics")
    if isinstance(metrics, dict):
        if len(metrics) > MAX_METRICS:
            raise UserError(f"metrics: {len(metrics)} given; at most {MAX_METRICS} per step accepted")
        for name, value in metrics.items():
            if isinstance(value, str):
                raise UserError(f"metrics.{name[:40]}: expected a number or null (got {value[:60]!r})")
    trajectories = _dicts_of(raw, "trajectories")
    segments = [s for t in trajectories for s in _dicts_of(t, "segments")]
    scorings = [s for t in trajectories if isinstance(s := t.get("scoring"), dict)]
    for place, objects in (
        ("body", [raw]),
        ("trajectories", trajectories),
        ("actions", [a for t in trajectories for a in _dicts_of(t, "actions")]),
        ("segments", segments),
        ("documents", [d for s in segments for d in _dicts_of(s, "documents")]),
        ("scoring", [*scorings, *(g for s in scorings for g in _dicts_of(s, "golden"))]),
    ):
        most = max(map(len, objects), default=0)
        if most > MAX_KEYS:
            raise UserError(f"{place}: an object of {most} keys; at most {MAX_KEYS} accepted")
        for one in objects:
            for key, value in one.items():
                if key in NUMBERS and isinstance(value, NUMBERS[key]):
                    raise UserError(f"{place}: {key}: expected a number (got {str(value)[:60]!r})")


def _dicts_of(holder: dict[str, Any], name: str) -> list[dict[str, Any]]:
    held = holder.get(name)
    return [one for one in held if isinstance(one, dict)] if isinstance(held, list) else []


def _first_of(error: ValidationError) -> Any:
    """The mistake to name. Where a key is misspelt, that is the reason why another one is not given."""
    found = error.errors(include_url=False)
    return next((one for one in found if one["type"] == "extra_forbidden"), found[0])


def one_line(error: ValidationError, known: Collection[str] = ()) -> str:
    """The first mistake, as `trajectories.3.actions.0.logp_before: what is accepted (got ...)`. `known`: the
    accepted keys, for a guess."""
    first = _first_of(error)
    key = ".".join(str(part) for part in first["loc"])
    given = first.get("input")
    if first["type"] == "extra_forbidden":
        return f"{key}: unknown key" + (f"; {accepted(str(first['loc'][-1]), known)}" if known else "")
    if first["type"] == "missing":
        return f"{key}: required, and not given"
    if first["type"] == "json_invalid":
        return f"body: not JSON ({first['ctx']['error']})"
    message = said(first["msg"])
    if first["type"] == "model_type":
        message = "Input should be an object"
    shown = "" if isinstance(given, dict | list | BaseModel) else f" (got {str(given)[:60]})"
    more = error.error_count() - 1
    return f"{key or 'body'}: {message}{shown}" + (f"; {more} more of the kind" if more else "")
