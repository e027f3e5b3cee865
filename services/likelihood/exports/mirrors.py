"""Steps mirrored to other trackers as they are stored: TensorBoard and, where they are installed, Weights &
Biases and MLflow."""

from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path
from typing import Any, Protocol

from services.common.loading.extras import needed_for
from services.common.users_files import writing
from services.likelihood.monitor.alarms import PHASES

log = logging.getLogger("unspiral.likelihood")
WAITING = 10_000
"""Steps that may wait for a slow tracker; older ones are then left out of it (never out of the store)."""


class Mirror(Protocol):
    """One tracker."""

    def step(
        self, run: str, step: int, time: float, metrics: dict[str, float | None], phase: str | None
    ) -> None: ...

    def close(self) -> None: ...


class TensorBoardMirror:
    """Event files below `folder`, one sub-folder per run; the phase is the scalar `phase`, its place in
    PHASES."""

    def __init__(self, folder: str | Path):
        with needed_for("", "tensorboard"):
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        self.folder = Path(folder)
        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._writer = EventFileWriter
        self._open: dict[str, Any] = {}
        with writing(f"tensorboard {folder}"):  # now, not at the first step, when nobody looks any more
            self.folder.mkdir(parents=True, exist_ok=True)

    def step(
        self, run: str, step: int, time: float, metrics: dict[str, float | None], phase: str | None
    ) -> None:
        if run not in self._open:
            self._open[run] = self._writer(str(self.folder / run))
        values = numbers(metrics, phase)
        summary = self._summary(
            value=[self._summary.Value(tag=name, simple_value=v) for name, v in values.items()]
        )
        self._open[run].add_event(self._event(wall_time=time, step=step, summary=summary))

    def close(self) -> None:
        for writer in self._open.values():
            writer.close()


class WandbMirror:
    """Runs of the same names in a Weights & Biases project; its own settings (WANDB_MODE, keys, ...) come
    from the environment."""

    def __init__(self, project: str):
        with needed_for(""):
            import wandb
        self._wandb = wandb
        self.project = project
        self._open: dict[str, Any] = {}

    def step(
        self, run: str, step: int, time: float, metrics: dict[str, float | None], phase: str | None
    ) -> None:
        if run not in self._open:
            self._open[run] = self._wandb.init(
                project=self.project, id=run, name=run, resume="allow", reinit="create_new"
            )
        self._open[run].log(numbers(metrics, phase), step=step)

    def close(self) -> None:
        for run in self._open.values():
            run.finish()


class MlflowMirror:
    """Runs of the same names in an MLflow experiment; the server comes from the environment
    (MLFLOW_TRACKING_URI). A `/` of a metric's name stays, as MLflow allows."""

    def __init__(self, experiment: str):
        with needed_for(""):
            from mlflow import MlflowClient
            from mlflow.entities import Metric
        self.experiment = experiment
        self._connect = MlflowClient
        self._metric = Metric
        self._client: Any = None
        self._open: dict[str, str] = {}

    def step(
        self, run: str, step: int, time: float, metrics: dict[str, float | None], phase: str | None
    ) -> None:
        if self._client is None:
            self._client = self._connect()
        if run not in self._open:
            self._open[run] = self._run_of(run)
        values = [
            self._metric(name, value, int(time * 1000), step)
            for name, value in numbers(metrics, phase).items()
        ]
        self._client.log_batch(self._open[run], metrics=values)

    def _run_of(self, run: str) -> str:
        """The id of the newest run of that name, which a resumed run goes on with, or of a new one."""
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self.experiment)
        runs = self._client.search_runs([experiment], f"attributes.run_name = '{run}'", max_results=1)
        return runs[0].info.run_id if runs else self._client.create_run(experiment, run_name=run).info.run_id

    def close(self) -> None:
        for id in self._open.values():
            self._client.set_terminated(id)


def numbers(metrics: dict[str, float | None], phase: str | None) -> dict[str, float]:
    """The metrics that have a value, and the phase's place in PHASES."""
    out = {name: value for name, value in metrics.items() if value is not None}
    return out if phase is None else {**out, "phase": float(PHASES.index(phase))}


class Mirroring:
    """Hands steps to mirrors in a thread of its own, so that a slow tracker holds nobody up. A tracker that
    fails is logged, not raised."""

    def __init__(self, mirrors: list[Mirror]):
        self.mirrors = mirrors
        self._queue: queue.Queue = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._work, name="likelihood-mirrors", daemon=True)
        self._thread.start()

    def step(
        self, run: str, step: int, time: float, metrics: dict[str, float | None], phase: str | None
    ) -> None:
        try:
            self._queue.put_nowait((run, step, time, metrics, phase))
        except queue.Full:
            log.warning(
                "mirrors are behind by %d steps: step %d of run %s is left out of them", WAITING, step, run
            )

    def close(self, timeout: float = 30.0) -> None:
        """Hand over what waits, then close the trackers."""
        self._queue.put(None, timeout=timeout)
        self._thread.join(timeout)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            for mirror in self.mirrors:
                try:
                    mirror.step(*item)
                except Exception as e:  # a tracker may raise anything: the service goes on without it
                    log.warning(
                        "%s: step %d of run %s not mirrored (%s: %s)",
                        type(mirror).__name__,
                        item[1],
                        item[0],
                        type(e).__name__,
                        e,
                    )
        for mirror in self.mirrors:
            mirror.close()
