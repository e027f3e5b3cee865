"""The client's promises against a real service: at once, in order, once, over outages."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from ports import kept_port

from services.common.errors import EnvironmentLacks, UserError
from services.contracts import TokenBatch
from services.likelihood.client import LikelihoodClient
from services.likelihood.records import ActionRecord, StepRecord, TrajectoryRecord
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from services.likelihood.store.sqlite.store import SQLiteStore


def record(step: int, attempt: int = 0, n: int = 3) -> StepRecord:
    trajectories = [
        TrajectoryRecord(
            uid=f"s{step}-{i}", group="g", reward=i % 2, advantage=1.0 if i % 2 else -1.0, tool_rounds=1,
            actions=[
                ActionRecord(tokens=4, logp_before=-2.0, logp_after=-3.0),
                ActionRecord(tokens=2, logp_before=-1.0),
            ],
        )
        for i in range(n)
    ]  # fmt: skip
    return StepRecord(
        step=step,
        attempt=attempt,
        metrics={"reward/mean": 0.5, "grad_norm": float("nan")},
        trajectories=trajectories,
    )


def tokens() -> TokenBatch:
    return TokenBatch(
        ["a", "b"], np.array([0, 3, 5]), np.arange(5, dtype=np.int32), np.array([-1, 0, 0, -1, 0], np.int16),
        logp_old=np.array([0, -1, -2, 0, -3], np.float32),
        advantages=np.array([1, -1], np.float32),
    )  # fmt: skip


def test_what_a_checkpoint_counts_on_outlives_a_kill_in_an_outage(tmp_path):
    port, spool = kept_port(), tmp_path / "spool"
    client = LikelihoodClient(f"http://127.0.0.1:{port}", spool_dir=spool)
    for step in range(3):
        client.post_step("run", record(step))
    began = time.monotonic()
    client.keep(60.0)
    client.post_step("run", record(3))
    client.keep(60.0)
    assert time.monotonic() - began < 50, "the service is known to be away"
    (tmp_path / "killed").mkdir()
    for file in spool.glob("*.msg"):  # what a killed process would leave
        (tmp_path / "killed" / file.name).write_bytes(file.read_bytes())
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0))
    with LikelihoodClient(server.url, spool_dir=tmp_path / "killed") as after:
        assert after.flush(60)
    server.stop()
    assert [s.step for s in SQLiteStore(tmp_path / "l.db").steps("run", 0, 99)] == [0, 1, 2, 3]
    client.close(timeout=0.1)


def test_a_record_that_cannot_be_written_out_does_not_cost_the_checkpoint_in_an_outage(tmp_path, caplog):
    def bad(step):
        return StepRecord.model_construct(
            step=step, attempt=0, policy_version=None, metrics={"x": {1, 2}}, trajectories=[]
        )

    client = LikelihoodClient(f"http://127.0.0.1:{kept_port()}", spool_dir=tmp_path / "spool")
    for one in (record(0), bad(1), record(2)):
        client.post_step("run", one)
    client.keep(60.0)
    for one in (bad(3), record(4)):
        client.post_step("run", one)
    assert client.close(timeout=0.1) == 3 and caplog.text.count("cannot be written out") == 2
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0))
    with LikelihoodClient(server.url, spool_dir=tmp_path / "spool") as after:
        assert after.flush(60)
    server.stop()
    assert [s.step for s in SQLiteStore(tmp_path / "l.db").steps("run", 0, 9)] == [0, 2, 4]


def test_tokens_come_back_as_they_were_put(tmp_path):
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0))
    with LikelihoodClient(server.url, spool_dir=tmp_path / "spool") as client:
        client.put_tokens("run", 4, tokens(), attempt=0)
        client.post_step("run", record(4))
        assert client.flush(60)
        back = client.get_tokens("run", 4)
        assert client.get_tokens("run", 3) is None
    assert back.uid == ["a", "b"] and back.offsets.tolist() == [0, 3, 5]
    assert back.action_ids.tolist() == [-1, 0, 0, -1, 0] and back.action_ids.dtype == np.int16
    assert back.logp_old.tolist() == [0, -1, -2, 0, -3] and back.advantages.tolist() == [1, -1]
    server.stop()


def test_an_outage_loses_and_doubles_nothing_and_keeps_the_order(tmp_path):
    port = kept_port()
    settings = ServeSettings(store=str(tmp_path / "l.db"), port=port)
    client = LikelihoodClient(f"http://127.0.0.1:{port}", spool_dir=tmp_path / "spool", memory_bytes=3000)
    started = time.monotonic()
    for step in range(12):  # nobody listens yet; 3000 bytes of memory hold a few steps, the rest goes to disk
        client.post_step("run", record(step))
    assert time.monotonic() - started < 30
    assert list((tmp_path / "spool").glob("*.msg")) and client.waiting == 12
    assert client.flush(0.1) is False
    server = serve_in_thread(settings)
    assert client.flush(60) and client.waiting == 0
    server.stop()
    for step in range(12, 20):
        client.post_step("run", record(step))
    assert client.close(timeout=0.2) == 8  # left on disk
    server = serve_in_thread(settings)
    client = LikelihoodClient(server.url, spool_dir=tmp_path / "spool", memory_bytes=3000)
    client.post_step("run", record(20))
    assert client.flush(60) and client.close() == 0
    store = SQLiteStore(tmp_path / "l.db")
    info = store.info("run")
    assert (info.steps, info.trajectories, info.first_step, info.last_step) == (21, 63, 0, 20)
    times = [s.time for s in SQLiteStore(tmp_path / "l.db").steps("run", 0, 100)]
    assert times == sorted(times)
    server.stop()


def test_a_superseded_attempt_in_the_spool_does_not_block_the_new_one(tmp_path):
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0))
    with LikelihoodClient(server.url, spool_dir=tmp_path / "spool") as client:
        client.post_step("run", record(5, attempt=1))
        client.post_step("run", record(6, attempt=0))
        client.post_step("run", record(6, attempt=1))
        assert client.flush(60) and client.refused == 1
    assert [(s.step, s.attempt) for s in SQLiteStore(tmp_path / "l.db").steps("run", 0, 99)] == [
        (5, 1),
        (6, 1),
    ]
    server.stop()


def test_a_port_in_use_and_a_spool_in_use_are_one_line_errors(tmp_path):
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0))
    with pytest.raises(EnvironmentLacks, match="in use") as caught:
        serve_in_thread(ServeSettings(store=str(tmp_path / "m.db"), port=int(server.url.rsplit(":")[-1])))
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)
    client = LikelihoodClient(server.url, spool_dir=tmp_path / "spool")
    with pytest.raises(EnvironmentLacks, match="in use") as caught:
        LikelihoodClient(server.url, spool_dir=tmp_path / "spool")
    assert caught.value.exit_code == 3
    client.close()
    server.stop()


def test_eight_writers_at_once_store_every_trajectory_once(tmp_path):
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0))

    def write(rank: int) -> None:
        with LikelihoodClient(server.url, spool_dir=tmp_path / f"spool{rank}") as client:
            for step in range(5):
                part = record(step)
                for t in part.trajectories:
                    t.uid = f"r{rank}-{t.uid}"
                client.post_step("run", part)
                client.post_step("run", part)  # sent twice
            client.flush(60)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(8)]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    store = SQLiteStore(tmp_path / "l.db")
    info = store.info("run")
    assert (info.steps, info.trajectories) == (5, 8 * 5 * 3)
    assert SQLiteStore(tmp_path / "l.db").steps("run", 0, 0)[0].metrics["logp/right"] == pytest.approx(-0.5)
    server.stop()


def test_tokens_that_still_wait_are_read_from_the_queue(tmp_path):
    client = LikelihoodClient(
        f"http://127.0.0.1:{kept_port()}", spool_dir=tmp_path / "spool", memory_bytes=500
    )
    for step in (3, 4):  # the first in memory, the second on disk; nobody listens
        client.put_tokens("run", step, tokens())
    assert list((tmp_path / "spool").glob("*-tokens.msg"))
    assert client.get_tokens("run", 3).uid == client.get_tokens("run", 4).uid == ["a", "b"]
    assert client.get_tokens("run", 5) is None and client.get_tokens("other", 3) is None
    client.close(timeout=0.1)


def test_a_record_that_cannot_be_written_or_read_does_not_stop_those_behind_it(tmp_path, caplog):
    spool = tmp_path / "spool"
    spool.mkdir()
    (spool / "0000000000000000-step.msg").write_bytes(b"torn")
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0))
    client = LikelihoodClient(server.url, spool_dir=spool)
    client.post_step(
        "run",
        StepRecord.model_construct(
            step=0, attempt=0, policy_version=None, metrics={"x": {1, 2}}, trajectories=[]
        ),
    )
    client.post_step("run", record(1))
    assert client.flush(60) and client.refused == 1 and client.close() == 0
    assert [s.step for s in SQLiteStore(tmp_path / "l.db").steps("run", 0, 9)] == [1]
    assert "cannot be written out" in caplog.text and list(spool.glob("*.bad"))
    server.stop()


def test_a_large_step_goes_in_parts_and_is_one_step(tmp_path, monkeypatch):
    monkeypatch.setattr("services.likelihood.client.PART", 2)
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0))
    with LikelihoodClient(server.url, spool_dir=tmp_path / "spool") as client:
        client.post_step("run", record(0, n=5))
        assert client.waiting <= 3 and client.flush(60)
    (step,) = SQLiteStore(tmp_path / "l.db").steps("run", 0, 9)
    assert step.trajectories == 5 and step.metrics["reward/mean"] == 0.5
    server.stop()


def test_an_address_without_http_is_refused(tmp_path):
    with pytest.raises(UserError, match="expected an address such as http"):
        LikelihoodClient("localhost:8100", spool_dir=tmp_path)
