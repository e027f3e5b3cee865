"""What every likelihood store keeps to, asked of SQLite and of a real Redis."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from likelihood_addresses import url  # noqa: F401
from places import ROOT
from redis_server import RedisServer, redis_server  # noqa: F401

from services.common.errors import EnvironmentLacks, UserError
from services.likelihood.client import LikelihoodClient
from services.likelihood.records import (
    ActionRecord,
    EventRecord,
    StepRecord,
    TrajectoryRecord,
)
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from services.likelihood.store.base import NotStored
from services.likelihood.store.opening import open_store
from services.likelihood.store.sqlite.store import SQLiteStore


@pytest.fixture
def store(url):
    store = open_store(url, token_steps=3)
    yield store
    store.close()


def trajectory(uid, reward=1.0, advantage=0.5, logp=-1.0):
    action = ActionRecord(tokens=2, logp_before=logp, logp_after=logp - 0.5, documents=["d1", "d2"])
    return TrajectoryRecord(
        uid=uid,
        group="g",
        reward=reward,
        advantage=advantage,
        tool_rounds=1,
        actions=[action, ActionRecord(tokens=1, logp_before=-0.25)],
    )


def record(step, attempt=0, uids=("a", "b"), **metrics):
    return StepRecord(
        step=step,
        attempt=attempt,
        policy_version=step,
        metrics=metrics,
        trajectories=[trajectory(u) for u in uids],
    )


def test_a_step_comes_back_as_it_was_put(store):
    receipt = store.put_step("run", record(3, x=1.5, y=None))
    assert (receipt.stored, receipt.superseded) == (2, 0)
    (step,) = store.steps("run", 0, 10)
    assert (step.step, step.attempt, step.policy_version, step.trajectories) == (3, 0, 3, 2)
    assert (
        step.metrics["x"] == 1.5
        and step.metrics["y"] is None
        and step.metrics["logp/right"] == pytest.approx(-1.25 / 3)
    )
    assert store.trajectories("run", 3) == [trajectory("a"), trajectory("b")]
    info = store.info("run")
    assert (info.first_step, info.last_step, info.steps, info.trajectories) == (3, 3, 1, 2)
    assert {"x", "y", "logp/right"} <= set(store.metric_names("run"))


def test_the_same_uid_is_stored_once_and_the_first_wins(store):
    store.put_step("run", record(0, uids=("a",)))
    again = StepRecord(step=0, trajectories=[trajectory("a", logp=-9.0), trajectory("b")])
    assert store.put_step("run", again).stored == 1
    assert store.trajectories("run", 0)[0] == trajectory("a") and store.info("run").trajectories == 2


def test_curves_hold_each_step_over_chunk_borders_and_gaps(store):
    for step in (0, 1, 511, 512, 1500):
        store.put_step("run", record(step, uids=(), x=float(step)))
    column = store.columns("run", ["x", "nothing"], 0, 1500)
    assert list(column) == ["x"]
    at = np.flatnonzero(~np.isnan(column["x"]))
    assert at.tolist() == [0, 1, 511, 512, 1500] and column["x"][at].tolist() == [0, 1, 511, 512, 1500]
    assert store.columns("run", ["x"], 511, 512)["x"].tolist() == [511, 512]


def test_a_higher_attempt_takes_the_place_of_later_steps_everywhere(store):
    for step in range(6):
        store.put_step("run", record(step, uids=(f"old{step}",), x=1.0))
        store.put_tokens("run", step, 0, b"old")
    store.save_monitor("run", 5, {"s": 5}, [], {5: 2})
    assert store.put_step("run", record(3, attempt=1, uids=("new",), x=2.0)).superseded == 3
    assert [(s.step, s.attempt) for s in store.steps("run", 0, 99)] == [(0, 0), (1, 0), (2, 0), (3, 1)]
    column = store.columns("run", ["x", "phase"], 0, 5)
    assert (
        column["x"][:4].tolist() == [1, 1, 1, 2] and np.isnan(column["x"][4:]).all() and "phase" not in column
    )
    assert [t.uid for t in store.trajectories("run", 3)] == ["new"] and store.trajectories("run", 4) == []
    assert store.get_tokens("run", 5) is None and store.load_monitor("run", 99) is None
    assert store.info("run").trajectories == 4 and store.info("run").attempt == 1
    with pytest.raises(UserError, match="attempt 1, which began at step 3"):
        store.put_step("run", record(4))
    with pytest.raises(UserError, match="is superseded by attempt"):
        store.put_tokens("run", 3, 0, b"late")
    assert store.put_step("run", record(1, uids=("late",))).stored == 1


def test_steps_of_a_new_attempt_may_arrive_out_of_order(store):
    for step in range(4):
        store.put_step("run", record(step, x=1.0))
    store.put_step("run", record(3, attempt=1, x=2.0))
    store.put_step("run", record(2, attempt=1, x=2.0))
    assert [(s.step, s.attempt) for s in store.steps("run", 0, 99)] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert store.columns("run", ["x"], 0, 3)["x"].tolist() == [1, 1, 2, 2]


def test_a_refused_write_changes_nothing(store):
    store.put_step("run", record(5, attempt=2))
    before = store.info("run")
    with pytest.raises(UserError, match="is superseded by attempt"):
        store.put_step("run", record(7, attempt=1))
    with pytest.raises(UserError, match="letters"):
        store.put_step("no/slash", record(0))
    after = store.info("run")
    assert (
        after.model_dump(exclude={"updated"}) == before.model_dump(exclude={"updated"})
        and len(store.runs()) == 1
    )


def test_only_the_newest_token_arrays_are_kept(store):
    for step in (1, 2, 5, 4, 9):
        store.put_tokens("run", step, 0, f"body{step}".encode())
    assert [store.get_tokens("run", s) for s in (1, 2, 4, 5, 9)] == [None, None, b"body4", b"body5", b"body9"]
    store.put_tokens("run", 9, 0, b"again")
    assert store.get_tokens("run", 9) == b"again"


def test_monitor_states_alarms_and_events_are_kept(store):
    store.put_step("run", record(0))
    for step in (499, 500, 501, 502):
        store.save_monitor(
            "run", step, {"at": step}, [{"rule": "likelihood", "step": step, "cleared": None}], {step: 1}
        )
    assert store.load_monitor("run", 600) == (502, {"at": 502})
    assert store.load_monitor("run", 502) == (500, {"at": 500}) and store.load_monitor("run", 500) is None
    assert store.alarms("run") == [{"rule": "likelihood", "step": 502, "cleared": None}]
    assert store.columns("run", ["phase"], 499, 502)["phase"].tolist() == [1, 1, 1, 1]
    for n in range(4):
        store.put_event("run", EventRecord(step=n, kind="k", text=f"t{n}", data={"n": n}))
    assert [(e["text"], e["data"]) for e in store.events("run", limit=2)] == [
        ("t2", {"n": 2}),
        ("t3", {"n": 3}),
    ]


def test_an_event_before_the_first_step_makes_the_run(store):
    store.put_event("run", EventRecord(step=0, kind="evaluation", text="before"))
    info = store.info("run")
    assert (info.steps, info.first_step, info.attempt) == (0, None, 0) and len(store.events("run")) == 1


def test_reads_of_an_unknown_run_say_so(store):
    for read in (store.info, store.metric_names, store.alarms, store.events, store.delete_run):
        with pytest.raises(NotStored, match="nowhere"):
            read("nowhere")


def test_runs_are_listed_latest_first_and_deleted_whole(store):
    for name in ("one", "two", "one"):
        store.put_step(name, record(0, uids=(name + str(time.time()),), x=1.0))
        time.sleep(0.01)
    assert [r.run for r in store.runs()] == ["one", "two"]
    store.put_tokens("one", 0, 0, b"x")
    store.delete_run("one")
    assert [r.run for r in store.runs()] == ["two"]
    store.put_step("one", record(9))
    assert (
        store.metric_names("one") and "x" not in store.metric_names("one") and store.steps("one", 0, 5) == []
    )


def test_pruning_keeps_the_curves(store):
    for step in range(5):
        store.put_step("run", record(step, x=float(step)))
    assert store.delete_trajectories("run", below=3) == 6
    store.compact()
    assert store.trajectories("run", 2) == [] and len(store.trajectories("run", 3)) == 2
    assert (
        store.columns("run", ["x"], 0, 4)["x"].tolist() == [0, 1, 2, 3, 4]
        and len(store.steps("run", 0, 9)) == 5
    )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 2), st.sets(st.sampled_from("abcd"), min_size=1)),
        max_size=12,
    )
)
def test_any_order_of_posts_leaves_what_a_plain_model_says(store, posts):
    for run in store.runs():
        store.delete_run(run.run)
    held, began = {}, {}
    for step, attempt, uids in posts:
        if any(a > attempt and first <= step for a, first in began.items()):
            with pytest.raises(UserError, match="is superseded by attempt"):
                store.put_step("run", record(step, attempt, sorted(uids), x=float(attempt)))
            continue
        began[attempt] = min(step, began.get(attempt, step))
        held = {s: v for s, v in held.items() if s < step or v[0] >= attempt}
        held[step] = (attempt, held.get(step, (attempt, set()))[1] | uids)
        store.put_step("run", record(step, attempt, sorted(uids), x=float(attempt)))
    if not posts:
        return
    assert {s.step: s.attempt for s in store.steps("run", 0, 99)} == {s: v[0] for s, v in held.items()}
    for step in range(6):
        assert {t.uid for t in store.trajectories("run", step)} == (held[step][1] if step in held else set())
    assert store.info("run").trajectories == sum(len(v[1]) for v in held.values())
    column = store.columns("run", ["x"], 0, 5)["x"]
    assert [None if np.isnan(v) else v for v in column] == [
        held[s][0] if s in held else None for s in range(6)
    ]


def test_eight_writers_at_once(url):
    stores = [open_store(url) for _ in range(8)]  # as eight services would

    def write(rank):
        for step in range(6):
            stores[rank].put_step(
                "run", record(step, uids=(f"{rank}-a", f"{rank}-b"), **{f"m{rank}": float(step)})
            )

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(8)]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    info = stores[0].info("run")
    assert (info.steps, info.trajectories) == (6, 96)
    for step in stores[0].steps("run", 0, 9):
        assert step.trajectories == 16 and {f"m{r}" for r in range(8)} <= set(step.metrics)
    [s.close() for s in stores]


WRITER = """
import sys
from services.likelihood.records import StepRecord, TrajectoryRecord, ActionRecord
from services.likelihood.store.opening import open_store
store = open_store(sys.argv[1])
for step in range(100000):
    action = ActionRecord(tokens=2, logp_before=-1.0)
    t = [TrajectoryRecord(uid=f"{step}-{i}", group="g", advantage=0, actions=[action]) for i in range(50)]
    store.put_step("run", StepRecord(step=step, metrics={"x": step}, trajectories=t))
    print(step, flush=True)  # acknowledged
"""


def test_a_killed_writer_loses_nothing_that_was_acknowledged(url, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), url],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    for line in process.stdout:
        if int(line) >= 30:
            break
    os.kill(process.pid, signal.SIGKILL)
    acknowledged = int((process.stdout.read().split() or ["30"])[-1])
    process.wait(60)
    store = open_store(url)
    steps = store.steps("run", 0, 10**6)
    assert [s.step for s in steps][: acknowledged + 1] == list(range(acknowledged + 1)) and len(
        steps
    ) <= acknowledged + 2
    assert all(s.trajectories == 50 for s in steps)
    assert store.columns("run", ["x"], 0, acknowledged)["x"].tolist() == list(range(acknowledged + 1))
    store.close()


@pytest.mark.slow
def test_redis_killed_for_ten_seconds_loses_and_doubles_nothing(tmp_path):
    redis = RedisServer(tmp_path / "redis")
    server = serve_in_thread(ServeSettings(store=redis.url, port=0))
    client = LikelihoodClient(
        server.url, spool_dir=tmp_path / "spool", memory_bytes=20_000, timeout_seconds=10
    )
    slowest, killed_at = 0.0, time.monotonic() + 1.0
    for step in range(60):  # one step every .2 s: 1 s up, 10 s away, then up again
        if redis.process.poll() is None and time.monotonic() > killed_at and step < 50:
            redis.kill()
        if redis.process.poll() is not None and time.monotonic() > killed_at + 10:
            redis.start()
        began = time.monotonic()
        client.post_step("run", record(step, uids=tuple(f"{step}-{i}" for i in range(20)), x=float(step)))
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.2)
    if redis.process.poll() is not None:
        redis.start()
    assert client.flush(60), client.waiting
    client.close()
    store = open_store(redis.url)
    steps = store.steps("run", 0, 1000)
    assert [s.step for s in steps] == list(range(60)) and all(s.trajectories == 20 for s in steps)
    assert [s.time for s in steps] == sorted(s.time for s in steps)  # in order
    assert store.info("run").trajectories == 1200 and client.refused == 0 and slowest < 5
    store.close()
    server.stop()
    redis.stop()


def test_a_store_that_is_away_is_a_503_and_one_line(tmp_path):
    redis = RedisServer(tmp_path / "redis")
    server = serve_in_thread(ServeSettings(store=redis.url, port=0))
    redis.kill()
    answer = httpx.post(f"{server.url}/v1/runs/run/steps", json={"step": 0})
    assert answer.status_code == 503 and "redis at 127.0.0.1" in answer.json()["detail"]
    assert (
        httpx.get(f"{server.url}/readyz").status_code == 503
        and httpx.get(f"{server.url}/healthz").status_code == 200
    )
    server.stop()
    with pytest.raises(EnvironmentLacks, match=r"redis at 127\.0\.0\.1") as caught:
        open_store(redis.url)
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)


def test_addresses_and_files_that_are_no_store_are_refused_in_one_line(tmp_path):
    with pytest.raises(UserError, match="expected a file path"):
        open_store("mysql://x")
    for held in (":memory:", "sqlite::memory:"):
        with pytest.raises(UserError, match="expected a file path"):
            open_store(held)
    with pytest.raises(UserError, match=f"{tmp_path}: a folder; give another file"):
        open_store(str(tmp_path))
    (tmp_path / "text.db").write_text("not a database " * 100)
    with pytest.raises(UserError, match="no SQLite database") as caught:
        open_store(str(tmp_path / "text.db"))
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    db = sqlite3.connect(tmp_path / "new.db")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(UserError, match="schema 99"):
        SQLiteStore(tmp_path / "new.db")


def test_a_password_in_the_address_stays_out_of_the_messages():
    with pytest.raises(EnvironmentLacks) as caught:
        open_store("redis://:hunter2@127.0.0.1:1/0")
    assert "hunter2" not in str(caught.value)


def test_what_the_reward_calls_right_is_kept_with_a_trajectory(store):
    said = {"a": True, "b": False, "c": None}
    made = [trajectory(u).model_copy(update={"right": right}) for u, right in said.items()]
    store.put_step("r", StepRecord(step=0, trajectories=made))
    assert {t.uid: t.right for t in store.trajectories("r", 0)} == said


def test_a_file_of_an_earlier_day_is_read_and_gains_the_later_column(tmp_path):
    path = tmp_path / "l.db"
    older = SQLiteStore(path)
    older.put_step("r", record(0))
    older.close()
    db = sqlite3.connect(path)
    db.execute("ALTER TABLE trajectory DROP COLUMN is_right")
    db.commit()
    db.close()
    store = SQLiteStore(path)
    store.put_step("r", record(1))
    assert [t.right for step in (0, 1) for t in store.trajectories("r", step)] == [None] * 4
    store.close()
