"""Steps of a run in other trackers: what arrives, and that a broken tracker holds nothing up."""

import sys
import threading
import types

import pytest

from services.common.errors import UserError
from services.settings import TrackingSettings
from trainer.config.schema import parse_config
from trainer.loop.records import tracking as module
from trainer.loop.records.tracking import Tracking


class Recorded:
    """A tracker that keeps what it is given, and fails as often as it is told to."""

    def __init__(self, fails=0):
        self.fails, self.steps, self.closed = fails, [], False

    def step(self, run, step, time, metrics, phase):
        if self.fails:
            self.fails -= 1
            raise ConnectionError("no\nserver")
        self.steps.append((run, step, metrics, phase))

    def close(self):
        self.closed = True


def test_a_tracker_that_fails_is_told_once_and_tried_again(monkeypatch, tmp_path):
    mirror, said = Recorded(fails=2), []
    monkeypatch.setattr(module, "WandbMirror", lambda project: mirror)
    tracking = Tracking(TrackingSettings(wandb="p"), "r", tmp_path, said.append)
    for step in (1, 2, 3):
        tracking.step({"step": step, "attempt": 0, "reward/mean": 0.5, "phase": "healthy", "why": "x"})
    tracking.close()
    assert mirror.steps == [("r", 3, {"reward/mean": 0.5}, "healthy")] and mirror.closed
    assert said == [
        "tracking.wandb: step 1 was not taken (ConnectionError: no server); the run goes on, and later "
        "steps are tried"
    ]


def test_a_tracker_that_hangs_keeps_no_run_from_its_end(monkeypatch, tmp_path):
    free = threading.Event()
    mirror = Recorded()
    mirror.step = lambda *given: free.wait(60)
    monkeypatch.setattr(module, "WandbMirror", lambda project: mirror)
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.1)
    tracking = Tracking(TrackingSettings(wandb="p"), "r", tmp_path, lambda text: None)
    for step in (1, 2):
        tracking.step({"step": step})
    tracking.close()
    assert not mirror.closed
    free.set()


def test_no_tracker_costs_nothing_and_a_folder_that_is_a_file_is_told(tmp_path):
    Tracking(TrackingSettings(), "r", tmp_path, pytest.fail).step({"step": 1})
    (tmp_path / "file").write_text("")
    said = []
    Tracking(TrackingSettings(tensorboard=str(tmp_path / "file")), "r", tmp_path, said.append)
    assert len(said) == 1 and said[0].startswith(f"tracking.tensorboard={tmp_path}/file: left out: ")


def test_mlflow_gets_each_step_in_the_run_of_its_name(monkeypatch, tmp_path):
    """MLflow's client by its published interface; the package itself is not among the dependencies."""
    calls = []

    class Client:
        def get_experiment_by_name(self, name):
            return None

        def create_experiment(self, name):
            calls.append(("experiment", name))
            return "e1"

        def search_runs(self, experiments, filter_string, max_results):
            return []

        def create_run(self, experiment, run_name):
            calls.append(("run", run_name))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="id1"))

        def log_batch(self, run, metrics):
            calls.append((run, sorted((m.key, m.value, m.step) for m in metrics)))

        def set_terminated(self, run):
            calls.append(("end", run))

    def metric(key, value, timestamp, step):
        return types.SimpleNamespace(key=key, value=value, timestamp=timestamp, step=step)

    entities = types.ModuleType("mlflow.entities")
    entities.Metric = metric
    mlflow = types.ModuleType("mlflow")
    mlflow.MlflowClient, mlflow.entities = Client, entities
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    tracking = Tracking(TrackingSettings(mlflow="mine"), "r", tmp_path, pytest.fail)
    tracking.step({"step": 4, "reward/mean": 0.25})
    tracking.close()
    assert calls == [
        ("experiment", "mine"),
        ("run", "r"),
        ("id1", [("reward/mean", 0.25, 4)]),
        ("end", "id1"),
    ]


def test_a_misspelt_tracker_names_the_nearest():
    raw = {"model": {"path": "m"}, "data": {"train": "t"}, "retriever": {"corpus": "c"}}
    with pytest.raises(UserError, match=r"tracking.wandbb: unknown key; did you mean tracking.wandb\?"):
        parse_config(raw | {"tracking": {"wandbb": "x"}})
