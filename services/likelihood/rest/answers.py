"""What the likelihood service answers, for its OpenAPI description. Fields that a newer part of the service
adds pass through."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from services.likelihood.records import RunInfo


class Answer(BaseModel):
    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)


class Alarm(Answer):
    """Something that a person should look at."""

    rule: str
    metric: str
    step: int
    """Step at which it was raised."""
    since: int
    """First step at which the sign was seen."""
    seen: str
    """What was seen when it was raised, in one line with numbers."""
    confidence: str
    """`low`, `medium` or `high`; it grows while further signs agree."""
    advice: str
    cleared: int | None = None
    """Step at which it ended; null while it stands."""


class Band(Answer):
    """Steps of one phase, both ends included."""

    phase: str
    first: int
    last: int


class Phase(Answer):
    """The phase of a run."""

    run: str
    step: int | None
    phase: str
    since: int
    bands: list[Band]
    undecided: dict[str, str]
    """The rules that cannot judge the run yet, each with the reason."""


class Summary(RunInfo):
    """What the head of the page shows."""

    model_config = ConfigDict(extra="allow")

    phase: str
    since: int
    metrics: dict[str, float | None]
    last_step_time: float | None
    """Unix seconds of the post of the last step. Null where the run has none."""
    metric_names: list[str]
    alarms: list[Alarm]


class Curve(Answer):
    """A value, or null, for each of the answer's steps; least and largest where a point stands for several
    steps."""

    mean: list[float | None]
    min: list[float | None] | None = None
    max: list[float | None] | None = None


class Series(Answer):
    """Curves of a run."""

    run: str
    attempt: int
    first: int | None
    last: int | None
    step: list[int]
    stride: int
    """Steps that one point stands for."""
    series: dict[str, Curve]


class StoredEvent(Answer):
    """Something that happened in a run."""

    step: int
    kind: str
    text: str
    data: dict[str, Any]
    time: float
    """Unix seconds."""


class TokensReceipt(Answer):
    """What was kept of a step's token arrays."""

    run: str
    step: int
    attempt: int
    trajectories: int
    kept_steps: int


class SampledStep(Answer):
    """A step of which trajectories are kept token by token."""

    step: int
    trajectories: int
