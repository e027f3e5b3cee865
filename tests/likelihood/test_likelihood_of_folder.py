"""A folder of runs, served as one store: `unspiral serve likelihood --store runs`."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing

import httpx
import pytest
from places import DATA

from services.common.errors import UserError
from services.likelihood.cli import _opened, _store_of
from services.likelihood.records import EventRecord, StepRecord
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from services.likelihood.store import of_folder
from services.likelihood.store.base import NotStored
from services.likelihood.store.of_folder import FolderStore
from services.likelihood.store.opening import open_store
from services.likelihood.store.sqlite.store import SQLiteStore

RECORDED = [json.loads(line) for line in (DATA / "lab" / "grpo_2.jsonl").read_text().splitlines()]


def step_of(number, **metrics):
    return StepRecord(step=number, metrics=metrics or {"reward/mean": number / 10})


def made(folder, *runs, steps=2):
    """A run's folder, in whose store the named runs lie."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(f"run: {{name: {runs[0]}}}\n")
    with closing(SQLiteStore(folder / "likelihood.db")) as store:
        for run in runs:
            for number in range(1, steps + 1):
                store.put_step(run, step_of(number))
    return folder


@pytest.fixture
def runs(tmp_path):
    folder = tmp_path / "runs"
    made(folder / "demo-0.before", "demo-0", steps=3)
    made(folder / "demo-0", "demo-0", steps=2)
    made(folder / "mine", "mine", steps=1)
    (folder / "of_redis").mkdir()
    (folder / "of_redis" / "config.yaml").write_text("run: {name: of_redis}\n")
    return folder


@pytest.fixture
def store(runs):
    with closing(open_store(str(runs))) as store:
        assert isinstance(store, FolderStore)
        yield store


def test_each_run_is_called_as_its_folder_is(store):
    assert {info.run: info.steps for info in store.runs()} == {"demo-0": 2, "demo-0.before": 3, "mine": 1}
    assert store.info("demo-0.before").run == "demo-0.before"
    assert [s.step for s in store.steps("demo-0.before", 0, 9)] == [1, 2, 3]
    assert [info.run for info in store.runs(1)] == ["mine"], "the one that was posted to last"


def test_what_is_posted_goes_to_the_run_s_own_file(store, runs):
    assert store.put_step("demo-0.before", step_of(4)).run == "demo-0.before"
    store.put_event("mine", EventRecord(step=1, kind="note", text="seen"))
    store.put_labels("mine", {"title": "My run"})
    with closing(SQLiteStore(runs / "demo-0.before" / "likelihood.db")) as one:
        assert one.info("demo-0").last_step == 4
    with closing(SQLiteStore(runs / "mine" / "likelihood.db")) as one:
        assert one.events("mine")[0]["text"] == "seen"
    assert next(info for info in store.runs() if info.run == "mine").title == "My run"
    store.delete_run("mine")
    with pytest.raises(NotStored, match="run mine: none of that name in "):
        store.info("mine")


def test_a_further_run_has_no_file_and_is_refused(store, runs):
    with pytest.raises(UserError, match="is a folder of runs, and takes no further one; post to a service"):
        store.put_step("new", step_of(1))
    assert sorted(p.parent.name for p in runs.glob("*/likelihood.db")) == ["demo-0", "demo-0.before", "mine"]


def test_runs_that_come_go_and_go_on_are_seen(store, runs):
    assert store.look() == set()
    made(runs / "later", "later")
    with closing(SQLiteStore(runs / "mine" / "likelihood.db")) as one:
        one.put_step("mine", step_of(2))
    assert store.look() == {"later", "mine"}
    assert store.info("later").steps == 2
    shutil.rmtree(runs / "demo-0")
    assert store.look() == {"demo-0"}
    assert {info.run for info in store.runs()} == {"demo-0.before", "mine", "later"}


def test_a_store_of_several_runs_has_them_by_their_own_names(tmp_path):
    made(tmp_path / "one", "a", "b")
    made(tmp_path / "two", "b", "c")
    with closing(open_store(str(tmp_path))) as store:
        assert {info.run for info in store.runs()} == {"a", "one.b", "two.b", "c"}


def test_more_runs_than_files_that_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr(of_folder, "OPEN", 2)
    for n in range(5):
        made(tmp_path / f"run{n}", "same", steps=n + 1)
    with closing(FolderStore(tmp_path)) as store:
        assert [store.info(f"run{n}").steps for n in range(5)] == [1, 2, 3, 4, 5]
        assert len(store._opened) == 2


def test_a_file_that_cannot_be_read_is_left_out_and_told_once(runs, caplog):
    with closing(sqlite3.connect(runs / "mine" / "likelihood.db")) as db:
        db.execute("PRAGMA user_version = 99")
    (runs / "of_redis" / "likelihood.db").write_text("no database at all")
    with closing(open_store(str(runs))) as store:
        assert {info.run for info in store.runs()} == {"demo-0", "demo-0.before"}
        store.look()
    told = sorted(r.getMessage() for r in caplog.records)
    assert len(told) == 2
    assert "mine/likelihood.db: made by another version (schema 99" in told[0]
    assert "of_redis/likelihood.db" in told[1]


def test_the_command_line_takes_a_folder_of_runs(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _store_of("runs") == "runs"
    assert _store_of("runs/mine") == "runs/mine/likelihood.db"
    with _opened("runs") as store:
        assert len(store.runs()) == 3
    with pytest.raises(UserError, match=r"no likelihood.db in runs/of_redis; a run with a store.url keeps"):
        _store_of("runs/of_redis")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no likelihood.db in empty, nor in a folder in it; "):
        _store_of("empty")


def test_the_service_shows_all_runs_with_their_evaluations(runs):
    made_here = runs / "mine" / "eval" / "search7-agent"
    made_here.mkdir(parents=True)
    (made_here / "table.html").write_text("<body>scores</body>")
    with serve_in_thread(ServeSettings(store=str(runs), port=0)) as service:
        with httpx.Client(base_url=service.url, timeout=30) as http:
            assert {r["run"] for r in http.get("/v1/runs").json()} == {"demo-0", "demo-0.before", "mine"}
            assert http.get("/v1/runs/demo-0.before/summary").json()["last_step"] == 3
            curve = http.get("/v1/runs/demo-0.before/series").json()
            assert (curve["run"], curve["step"]) == ("demo-0.before", [1, 2, 3])
            assert http.get("/v1/runs/mine/evaluations").json() == ["search7-agent"]
            assert http.get("/v1/runs/demo-0/evaluations").json() == []
            refused = http.post("/v1/runs/new/steps", json={"step": 1, "metrics": {"x": 1.0}})
            assert refused.status_code == 409 and "takes no further one" in refused.json()["detail"]
            for row in RECORDED[:40]:
                numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
                body = {"step": row["step"] + 5, "metrics": numbers}
                http.post("/v1/runs/mine/steps", json=body).raise_for_status()
            assert http.get("/v1/runs/mine/phase").json()["phase"] == "collapsed"
            assert http.get("/readyz").status_code == 200


def test_open_pages_hear_of_steps_that_a_run_itself_writes(runs):
    with serve_in_thread(ServeSettings(store=str(runs), port=0)) as service:
        with httpx.stream("GET", f"{service.url}/v1/stream", timeout=30) as stream:
            lines = stream.iter_lines()
            assert next(line for line in lines if line.startswith("event: ")) == "event: hello"
            with closing(SQLiteStore(runs / "mine" / "likelihood.db")) as one:
                one.put_step("mine", step_of(2))
            assert next(line for line in lines if line.startswith("event: ")) == "event: about"
            assert json.loads(next(line for line in lines if line.startswith("data: "))[6:])["run"] == "mine"
