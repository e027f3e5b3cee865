"""What a likelihood store does. Two keep it: SQLite (embedded, `sqlite/store.py`) and Redis
(`redis/store.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from services.common.errors import UserError
from services.likelihood.microscope.heads import SampleHead
from services.likelihood.microscope.prompts import MOST_PROMPTS, KeptPrompt
from services.likelihood.microscope.record import SampledTrajectory
from services.likelihood.records import (
    EventRecord,
    RunInfo,
    StepReceipt,
    StepRecord,
    StoredStep,
    TrajectoryRecord,
)


class NotStored(UserError):
    """The store holds no run of that name, or no token arrays of that step."""

    status = 404


EVALUATION = "evaluation"
"""The kind of event that carries held-out scores (services.likelihood.evaluations)."""
MONITOR_SPACING = 500
"""Steps between monitor states that are kept for good (the newest is kept besides): a superseded step replays
at most so many."""


SAMPLE_STEPS = 1000
"""Steps whose trajectories are kept token by token, where nobody says otherwise."""
MAX_RUNS = 100_000
"""Most runs that a list names."""
MAX_STEP_TRAJECTORIES = 200_000
MAX_STEP_PACKED = 128 << 20
"""Most bytes of the packed actions of one step: every post to a step works out its metrics anew."""


def refuse_overfull(run: str, step: int, trajectories: int, packed: int) -> None:
    """Raise UserError for a step that would hold more than it may."""
    if trajectories > MAX_STEP_TRAJECTORIES or packed > MAX_STEP_PACKED:
        raise UserError(
            f"run {run}: step {step} would hold {trajectories} trajectories, {packed} bytes of actions; at "
            f"most {MAX_STEP_TRAJECTORIES} and {MAX_STEP_PACKED} accepted"
        )


def superseded_error(run: str, step: int, attempt: int, later: int, began: int) -> UserError:
    """The error of a write to a step that a higher attempt has taken over; nothing was stored."""
    return UserError(
        f"run {run}: step {step} of attempt {attempt} is superseded by attempt {later}, which began at step "
        f"{began}; nothing stored",
        status=409,
    )


class LikelihoodStore(Protocol):
    """Runs, their steps, trajectories and metric curves, and the token arrays of the last `token_steps`
    steps.

    Thread-safe. A write that has returned survives `kill -9` of the process. Methods raise
    EnvironmentLacks when the store is away, NotStored for reads of a run that was never written, UserError
    (409) for writes that a higher attempt has overtaken.
    """

    token_steps: int
    sample_steps: int
    """Newest steps whose trajectories are kept token by token, beside the first one and those of alarms."""

    def put_step(self, run: str, record: StepRecord) -> StepReceipt:
        """Store a step, or merge it with what earlier posts of the same step and attempt held. Writing it
        twice changes nothing."""
        ...

    def put_tokens(self, run: str, step: int, attempt: int, body: bytes) -> None:
        """Keep the npz body of a step, and only those of the newest `token_steps` steps."""
        ...

    def get_tokens(self, run: str, step: int) -> bytes | None:
        """The npz body, or None if that step has none (any more)."""
        ...

    def put_samples(self, run: str, step: int, attempt: int, trajectories: list[SampledTrajectory]) -> int:
        """Keep trajectories of a step token by token, and only those of `sample_steps` steps. The same uid
        again changes nothing. How many were new. Raises UserError for a step that would hold too much."""
        ...

    def sample_heads(self, run: str, step: int) -> list[SampleHead]:
        """Heads of the trajectories that `put_samples` kept of a step, by uid; none where it has none."""
        ...

    def samples(self, run: str, step: int, group: str | None = None) -> list[SampledTrajectory]:
        """Those trajectories themselves, by uid; of one group if it is named."""
        ...

    def sampled_steps(self, run: str) -> dict[int, int]:
        """Number of those trajectories by step, in order."""
        ...

    def prompts(self, run: str, limit: int = MOST_PROMPTS) -> list[KeptPrompt]:
        """The prompts of those trajectories: those that a probe follows first, then those of most steps, then
        the latest."""
        ...

    def prompt_groups(self, run: str, prompt: str) -> dict[int, list[str]]:
        """The groups of those trajectories that answer a prompt, by step, in order."""
        ...

    def runs(self, limit: int = MAX_RUNS) -> list[RunInfo]:
        """The runs that were updated last, the latest first."""
        ...

    def info(self, run: str) -> RunInfo: ...

    def metric_names(self, run: str) -> list[str]: ...

    def columns(self, run: str, names: Iterable[str], first: int, last: int) -> dict[str, np.ndarray]:
        """float64 [last - first + 1] for each name that has a value somewhere; NaN where a step has none."""
        ...

    def curve(self, run: str, name: str, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Steps (int64, rising) and values (float64, no NaN) of what is stored of a metric in the range.

        The cost grows with what is stored, not with the range.
        """
        ...

    def steps(self, run: str, first: int, last: int, limit: int = 1000) -> list[StoredStep]:
        """The first `limit` stored steps of the range, in order."""
        ...

    def trajectories(self, run: str, step: int) -> list[TrajectoryRecord]: ...

    def trajectory_counts(self, run: str, step: int) -> tuple[int, int]:
        """How many of them there are, and of how many groups, without reading their actions."""
        ...

    def save_monitor(
        self, run: str, step: int, state: dict[str, Any], alarms: list[dict], phases: Mapping[int, int]
    ) -> None:
        """The monitor's state after a step, all alarms of the run so far, and phase codes by step (the curve
        named `phase`)."""
        ...

    def load_monitor(self, run: str, before: int) -> tuple[int, dict[str, Any]] | None:
        """(step, state) of the newest kept state of a step below `before`."""
        ...

    def alarms(self, run: str) -> list[dict]: ...

    def put_event(self, run: str, event: EventRecord) -> None: ...

    def events(self, run: str, limit: int = 1000, kind: str | None = None) -> list[dict]:
        """The newest events, or those of a kind, oldest first: step, kind, text, data, time. Those of kind
        EVALUATION are found without reading the others."""
        ...

    def put_about(self, run: str, changes: dict[str, Any]) -> None:
        """Set keys of what the run says of itself (AboutRecord); makes the run."""
        ...

    def about(self, run: str) -> dict[str, Any]:
        """Those keys; empty where nothing was posted."""
        ...

    def put_labels(self, run: str, changes: dict[str, Any]) -> None:
        """Set keys of what people call the run (LabelsRecord), which `info` gives back. They do not count as
        a post to the run."""
        ...

    def delete_trajectories(self, run: str, below: int) -> int:
        """Forget the trajectories of all steps below, also those that are kept token by token; metrics and
        curves stay. How many of the step records went."""
        ...

    def delete_run(self, run: str) -> None: ...

    def compact(self) -> None:
        """Give freed space back."""
        ...

    def ping(self) -> None:
        """Raises EnvironmentLacks if the store does not answer."""
        ...

    def close(self) -> None: ...
