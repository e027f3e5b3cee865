"""What crosses the interface of the control plane: requests, answers, and the protocol behind it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool

from services.common.errors import EnvironmentLacks

MAX_WORKERS = 10_000


def no_run(line: str) -> EnvironmentLacks:
    """What a request meets where no run is there that could carry it out."""
    return EnvironmentLacks(line, status=409)


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Answer(Record):
    """What a client reads. Fields that it does not know are a newer run's, and passed over."""

    model_config = ConfigDict(extra="ignore")


def _whole(value: Any) -> Any:
    """4.0 is a whole number in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Scale(Record):
    """How many rollout workers are wanted. None at all would end the run: a pause is meant for that."""

    n: Annotated[int, Field(ge=1, le=MAX_WORKERS, strict=True), BeforeValidator(_whole)] | Literal["all"]
    """A number, or "all": as many as the cluster's `rollout` resource (or its GPUs) allows, now and when
    nodes come and go."""
    ahead: StrictBool = False
    """Also where the cluster has no room for so many yet: an autoscaler, or somebody, will add nodes."""


class WorkerStatus(Answer):
    """One rollout worker."""

    id: str
    node: str
    pid: int
    state: str
    """starting, waiting (for weights), ready, syncing, draining or failed."""
    version: int
    """Policy version that it holds."""
    outstanding_tokens: int
    """Tokens that the trajectories it runs are expected to take."""
    trajectories: int
    """Trajectories that it has finished."""


class Reach(Answer):
    """A service that the run uses."""

    url: str
    reachable: bool
    problem: str | None = None


class RunStatus(Answer):
    """What a run is doing."""

    state: Literal["no run", "starting", "running", "paused", "pausing", "ending", "ended"]
    """`pausing`: the step in hand is coming to its end. `ended`: said by `unspiral status` alone, of a run's
    folder; `stage` is then how."""
    run: str | None = None
    folder: str | None = None
    attempt: int = 0
    step: int = 0
    """Last step that was finished."""
    steps: int | None = 0
    """Steps of the whole run; null where an ended run's folder does not tell them."""
    stage: str = ""
    """What is being done now."""
    phase: str = ""
    """Of the likelihood monitor."""
    version: int | None = 0
    """Policy version of the learner; null of an ended run without a step."""
    target: int = 0
    """Workers wanted."""
    follows_cluster: bool = False
    """Whether `target` goes with the cluster ("all")."""
    problem: str | None = None
    """Why there are fewer workers than wanted."""
    workers: list[WorkerStatus] = []
    tokens_per_s: float | None = 0.0
    """Tokens per second that the workers wrote, over the trajectories finished in the last 30 seconds; null
    of an ended run."""
    last_sync_seconds: float | None = None
    rewards: list[float | None] = []
    """Mean reward of the last steps, oldest first."""
    restores: int = 0
    """Times that the learner was lost and restored."""
    retriever: Reach | None = None
    store: Reach | None = None
    seconds: float | None = 0.0
    """Since the run (this attempt of it) began; of an ended run what its last attempt took, null where it
    left no summary."""
    others: list[str] = []
    """Further runs on the same cluster, which a gateway does not speak for."""


class Done(Answer):
    """What was done, or is being done."""

    text: str
    target: int | None = None


PAUSE_INSTEAD = "a run without workers ends; to have it wait with its workers kept, use `unspiral pause`"


class Control(Protocol):
    """What the server serves: a run itself, or a gateway to one.

    All methods raise UserError for a request that is wrong (status 404 for an unknown worker), and
    EnvironmentLacks where the cluster or the run does not allow it: status 409 where no run is there
    (`no_run`) and for too few resources, 503 where nothing answers, 504 for a run that is there and does not
    answer.
    """

    async def ready(self) -> None:
        """Return where requests can be answered."""

    async def status(self) -> RunStatus: ...

    async def scale(self, n: int | Literal["all"], ahead: bool) -> Done: ...

    async def drain(self, worker: str) -> Done: ...

    async def pause(self) -> Done: ...

    async def resume(self) -> Done: ...
