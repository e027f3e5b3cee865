"""Upkeep and export: prune, Parquet, TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib.util
import os
import signal
import sqlite3
import subprocess
import sys
import time

import httpx
import pyarrow.parquet as pq
import pytest
import typer
from places import ROOT
from typer.testing import CliRunner

from services.common.errors import EnvironmentLacks, UserError
from services.likelihood.cli import likelihood_app, monitor_app
from services.likelihood.exports.mirrors import Mirroring, WandbMirror
from services.likelihood.monitor.alarms import PHASES
from services.likelihood.records import ActionRecord, StepRecord, TrajectoryRecord
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from services.likelihood.store.sqlite.store import SQLiteStore

app = typer.Typer()
app.add_typer(likelihood_app, name="likelihood")
app.add_typer(monitor_app, name="monitor")


def unspiral(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def database(tmp_path):
    store = SQLiteStore(tmp_path / "l.db")
    for step in range(6):
        action = ActionRecord(tokens=3, logp_before=-1.5, logp_after=-1.0, documents=["d1", "d2"])
        last = ActionRecord(tokens=1, logp_before=-0.5)
        t = [
            TrajectoryRecord(
                uid=f"u{step}{i}",
                group="g",
                reward=i,
                advantage=i - 0.5,
                tool_rounds=1,
                actions=[action, last],
            )
            for i in range(2)
        ]
        store.put_step(
            "run",
            StepRecord(step=step, policy_version=step, metrics={"x": step / 2, "step": 1.0}, trajectories=t),
        )
        store.put_step("other", StepRecord(step=step, metrics={"y": None}))
    store.close()
    return tmp_path / "l.db"


def test_export_writes_steps_and_actions_as_parquet(database, tmp_path):
    done = unspiral("likelihood", "export", tmp_path / "out", "--store", database, "--run", "run")
    assert done.exit_code == 0, done.output
    steps = pq.read_table(tmp_path / "out" / "run-steps.parquet").to_pydict()
    assert (
        steps["step"] == [0, 1, 2, 3, 4, 5]
        and steps["x"] == [0, 0.5, 1, 1.5, 2, 2.5]
        and steps["metric/step"] == [1.0] * 6
    )
    assert steps["logp/right"] == [pytest.approx(-0.5)] * 6
    actions = pq.read_table(tmp_path / "out" / "run-actions.parquet").to_pylist()
    assert len(actions) == 24
    assert actions[0] == {
        "step": 0, "uid": "u00", "group": "g", "reward": 0.0, "advantage": -0.5, "tool_rounds": 1,
        "action": 0, "tokens": 3, "logp_before": -1.5, "logp_after": -1.0, "documents": ["d1", "d2"],
    }  # fmt: skip
    assert actions[1]["logp_after"] is None and actions[1]["documents"] is None


def test_prune_forgets_trajectories_but_not_curves_and_gives_space_back(database):
    done = unspiral("likelihood", "prune", "--store", database, "--keep-steps", 2)
    assert done.exit_code == 0 and done.output == "0 runs and 8 trajectories forgotten\n"
    store = SQLiteStore(database)
    assert [len(store.trajectories("run", s)) for s in range(6)] == [0, 0, 0, 0, 2, 2]
    assert store.columns("run", ["x"], 0, 5)["x"].tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
    store.close()


def test_prune_forgets_old_runs(database):
    with sqlite3.connect(database) as db:
        db.execute("UPDATE run SET updated=? WHERE name='other'", (time.time() - 10 * 86400,))
    assert (
        unspiral("likelihood", "prune", "--store", database, "--older-than-days", 7).output
        == "1 run and 0 trajectories forgotten\n"
    )
    assert [r.run for r in SQLiteStore(database).runs()] == ["run"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["prune", "--store", "nowhere.db", "--keep-steps", "1"], "nowhere.db: no such file"),
        (["prune"], "expected --keep-steps N or --older-than-days N, such as `--keep-steps 100`"),
        (["export", "out", "--store", "nowhere.db"], "nowhere.db: no such file"),
    ],
)
def test_mistakes_are_one_line(arguments, says):
    error = unspiral("likelihood", *arguments).exception
    assert (
        isinstance(error, UserError)
        and says in str(error)
        and error.exit_code == 2
        and "\n" not in str(error)
    )


def test_rules_in_a_file_change_the_replay_and_a_bad_key_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {i}, "probe/lag": -0.06}}\n' for i in range(20))
    )
    (tmp_path / "rules.yaml").write_text("lag_nats: -0.05\n")
    assert "no alarm" in unspiral("monitor", "replay", tmp_path).output
    assert (
        "alarm at step 6"
        in unspiral("monitor", "replay", tmp_path, "--rules", tmp_path / "rules.yaml").output
    )
    (tmp_path / "whole.yaml").write_text("model: {path: m}\nmonitor: {rules: {lag_nats: -0.05}}\n")
    assert (
        "alarm at step 6"
        in unspiral("monitor", "replay", tmp_path, "--rules", tmp_path / "whole.yaml").output
    )
    (tmp_path / "rules.yaml").write_text("lag_nat: -0.05\n")
    error = unspiral("monitor", "replay", tmp_path, "--rules", tmp_path / "rules.yaml").exception
    assert str(error) == f"--rules {tmp_path / 'rules.yaml'}: lag_nat: unknown key; did you mean lag_nats?"


def test_the_service_runs_alone_says_where_it_is_and_ends_cleanly(tmp_path):
    code = (
        "import sys, typer; from services.likelihood.cli import serve_likelihood; typer.run(serve_likelihood)"
    )
    (tmp_path / "runs" / "demo-1").mkdir(parents=True)
    (tmp_path / "runs" / "demo-1" / "metrics.jsonl").touch()
    command = [sys.executable, "-c", code, "--store", "demo-2", "--port", "0"]
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=path, stderr=subprocess.PIPE, text=True)
    said = process.stderr.readline()
    assert said.startswith("likelihood service: http://127.0.0.1:")
    assert process.stderr.readline() == (
        "likelihood service: demo-2 is new and empty; did you mean runs/demo-1?\n"
    )
    assert httpx.get(said.split()[2] + "/readyz", timeout=30).status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) in (0, -signal.SIGTERM, 143)
    assert "Traceback" not in process.stderr.read()


def read_scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(s.step, s.value) for s in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_gets_stored_runs_and_live_steps(database, tmp_path):
    done = unspiral(
        "likelihood", "export", tmp_path / "tb", "--store", database, "--run", "run", "--to", "tensorboard"
    )
    assert done.exit_code == 0 and "run: 6 steps" in done.output
    assert read_scalars(tmp_path / "tb" / "run")["x"] == [(i, i / 2) for i in range(6)]

    server = serve_in_thread(
        ServeSettings(store=str(tmp_path / "n.db"), port=0, tensorboard=str(tmp_path / "live"))
    )
    for step in range(3):
        httpx.post(
            f"{server.url}/v1/runs/r/steps", json={"step": step, "metrics": {"a/b": step, "null": None}}
        ).raise_for_status()
    server.stop()
    scalars = read_scalars(tmp_path / "live" / "r")
    assert scalars == {
        "a/b": [(0, 0), (1, 1), (2, 2)],
        "phase": [(i, PHASES.index("unknown")) for i in range(3)],
    }


def test_wandb_is_used_where_installed_and_named_where_not(database, tmp_path, monkeypatch):
    if importlib.util.find_spec("wandb") is None:
        with pytest.raises(EnvironmentLacks, match="pip install wandb") as caught:
            WandbMirror("p")
        assert caught.value.exit_code == 3
        return
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    done = unspiral("likelihood", "export", "project", "--store", database, "--run", "run", "--to", "wandb")
    assert done.exit_code == 0, done.output
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_a_tracker_that_fails_holds_nobody_up(caplog):
    class Broken:
        def step(self, *step):
            raise RuntimeError("tracker down")

        def close(self):
            pass

    mirroring = Mirroring([Broken()])
    mirroring.step("r", 3, 0.0, {}, None)
    mirroring.close()
    assert "step 3 of run r not mirrored (RuntimeError: tracker down)" in caplog.text
