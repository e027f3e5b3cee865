"""Evaluations posted as events: where their scores are shown, in both stores."""

from __future__ import annotations

import sqlite3

import pyarrow.parquet as pq
import pytest
import redis
from fastapi.testclient import TestClient
from likelihood_addresses import url  # noqa: F401
from redis_server import redis_server  # noqa: F401

from services.likelihood import evaluations
from services.likelihood.evaluations import evaluation_event
from services.likelihood.exports.mirrors import Mirroring
from services.likelihood.exports.upkeep import export_parquet, export_to
from services.likelihood.rest.server import create_app
from services.likelihood.store.opening import open_store

GREEDY = "eval/em_greedy"


@pytest.fixture
def client(url):
    store = open_store(url)
    yield TestClient(create_app(store))
    store.close()


def step(client, number, attempt=0, **metrics):
    body = {"step": number, "attempt": attempt, "metrics": {"reward/mean": 0.5} | metrics}
    client.post("/v1/runs/a/steps", json=body).raise_for_status()


def evaluated(client, number, score, attempt=0):
    event = evaluation_event(number, attempt, "t", "greedy", {"em": score, "n": 4}, {GREEDY: score})
    client.post("/v1/runs/a/events", json=event.model_dump()).raise_for_status()


def shown(client, query=""):
    series = client.get(f"/v1/runs/a/series?names={GREEDY}{query}").json()
    curve = series["series"].get(GREEDY, {"mean": []})["mean"]
    return {s: v for s, v in zip(series["step"], curve, strict=False) if v is not None}


def test_a_score_counts_once_at_the_step_that_was_scored_and_is_the_latest(client):
    evaluated(client, 0, 0.25)
    assert shown(client) == {0: 0.25}, "before any step"
    step(client, 1, **{GREEDY: 0.25})
    step(client, 2)
    evaluated(client, 2, 0.5)
    assert shown(client) == {1: 0.25, 2: 0.5}
    summary = client.get("/v1/runs/a/summary").json()
    assert summary["metrics"][GREEDY] == 0.5 and GREEDY in summary["metric_names"]
    step(client, 3, **{GREEDY: 0.5})
    assert shown(client) == {1: 0.25, 2: 0.5}
    assert GREEDY not in client.get("/v1/runs/a/summary").json()["metrics"]
    evaluated(client, 3, 0.5)
    assert shown(client) == {1: 0.25, 2: 0.5, 3: 0.5}, "an equal score of the next step is its own"
    assert shown(client, "&first=2&last=2") == {2: 0.5}
    assert GREEDY in client.get("/v1/runs/a/series").json()["series"]


def test_the_monitor_judges_lines_alone_and_once(client):
    for number in range(1, 4):
        step(client, number)
    bands = client.get("/v1/runs/a/phase").json()
    lines = client.get("/v1/runs/a/steps").json()
    evaluated(client, 3, 0.5)
    now = client.get("/v1/runs/a/phase").json()
    counted = {"reward_gap": "1 value of the held-out score, and 3 are needed"}
    assert now == bands | {"undecided": bands["undecided"] | counted}, "it is counted, and judges nothing"
    assert client.get("/v1/runs/a/steps").json() == lines


def test_scores_of_steps_that_a_later_attempt_makes_again_are_left_out(client):
    evaluated(client, 0, 0.1)
    for number in range(1, 7):
        step(client, number)
        if number % 2 == 0:
            evaluated(client, number, number / 10)
    assert shown(client) == {1: 0.1, 2: 0.2, 4: 0.4, 6: 0.6}
    step(client, 4, attempt=1)
    assert shown(client) == {1: 0.1, 2: 0.2}, "the run went back to step 3"
    evaluated(client, 4, 0.7, attempt=1)
    for number in (5, 6):
        step(client, number, attempt=1)
    assert shown(client) == {1: 0.1, 2: 0.2, 4: 0.7}


def test_scores_in_the_lines_of_other_trainers_and_of_old_stores_stay_where_they_are(client):
    for number, score in ((1, 0.1), (2, 0.1), (3, 0.3)):
        step(client, number, **{GREEDY: score})
    plain = {"step": 1, "kind": "evaluation", "text": "mine", "data": {"metrics": "none"}}
    odd = {"step": 2, "kind": "evaluation", "text": "mine", "data": {"metrics": {GREEDY: "high", "x": True}}}
    other = {"step": 2, "kind": "checkpoint", "text": "mine", "data": {"metrics": {GREEDY: 0.9}}}
    for event in (plain, odd, other):
        client.post("/v1/runs/a/events", json=event).raise_for_status()
    assert shown(client) == {1: 0.1, 2: 0.1, 3: 0.3}
    assert client.get("/v1/runs/a/summary").json()["metrics"][GREEDY] == 0.3


class Kept:
    """A tracker that keeps the points of one curve."""

    def __init__(self):
        self.points = []

    def step(self, run, step, time, metrics, phase):
        if GREEDY in metrics:
            self.points.append((step, metrics[GREEDY]))

    def close(self):
        """Nothing to close."""


def in_prometheus(client):
    text = client.get("/metrics").text
    line = [line for line in text.splitlines() if f'name="{GREEDY}"' in line and 'run="a"' in line]
    return float(line[0].split()[-1]) if line else None


def test_mirrors_prometheus_and_exports_have_the_scores_that_the_curves_have(url, tmp_path):
    store = open_store(url)
    mirror = Kept()
    mirroring = Mirroring([mirror])
    client = TestClient(create_app(store, mirroring=mirroring))
    evaluated(client, 0, 0.25)
    step(client, 1, **{GREEDY: 0.25})
    step(client, 2)
    assert in_prometheus(client) == 0.25, "the newest, one step after it"
    evaluated(client, 2, 0.5)
    step(client, 3, **{GREEDY: 0.5})
    assert in_prometheus(client) == 0.5
    evaluated(client, 3, 0.75)  # the last one: no line follows
    evaluated(client, 9, 0.9)  # of a step that the run has not
    mirroring.close()
    curve = shown(client)
    assert curve == {1: 0.25, 2: 0.5, 3: 0.75}
    assert mirror.points == list(curve.items()) and in_prometheus(client) == 0.75
    exported = Kept()
    assert export_to(store, "a", exported) == 3 and exported.points == mirror.points
    rows = pq.read_table(export_parquet(store, "a", tmp_path / "out")[0]).to_pylist()
    assert {row["step"]: row[GREEDY] for row in rows} == curve
    store.close()


def test_an_export_has_the_scores_of_a_step_without_a_line(client, url):
    step(client, 10)
    evaluated(client, 15, 0.5)
    step(client, 20)
    store = open_store(url)
    exported = Kept()
    assert export_to(store, "a", exported) == 3 and exported.points == [(15, 0.5)]
    store.close()


def test_other_events_never_push_a_score_out_of_its_curve(client, monkeypatch):
    monkeypatch.setattr(evaluations, "MOST_EVENTS", 2)
    step(client, 1)
    evaluated(client, 1, 0.5)
    for number in range(4):
        event = {"step": 1, "kind": "checkpoint", "text": str(number)}
        client.post("/v1/runs/a/events", json=event).raise_for_status()
    assert shown(client) == {1: 0.5}

    def texts(query):
        return [event["text"] for event in client.get(f"/v1/runs/a/events?{query}").json()]

    assert texts("kind=checkpoint&limit=2") == ["2", "3"]
    assert texts("kind=evaluation") == ["t, greedy: EM 0.500, n 4"]
    assert texts("kind=other") == [] and len(texts("limit=10")) == 5


def test_events_of_a_store_from_before_they_were_found_by_kind_are_found(url):
    store = open_store(url)
    client = TestClient(create_app(store))
    step(client, 1)
    evaluated(client, 1, 0.5)
    if url.startswith("sqlite:"):
        with sqlite3.connect(url.removeprefix("sqlite:")) as db:
            db.execute("DROP INDEX event_kind")
    else:
        with redis.Redis.from_url(url) as server:
            assert server.delete("unspiral:run:a:evaluations", "unspiral:run:a:events_sorted") == 2
    store.close()
    store = open_store(url)
    client = TestClient(create_app(store))
    assert shown(client) == {1: 0.5}
    step(client, 2)
    evaluated(client, 2, 0.75)
    assert len(store.events("a", kind="evaluation")) == 2 and shown(client) == {1: 0.5, 2: 0.75}
    if url.startswith("sqlite:"):
        with sqlite3.connect(url.removeprefix("sqlite:")) as db:
            asked = "SELECT data FROM event WHERE run=1 AND kind='evaluation' ORDER BY id DESC LIMIT 9"
            assert "event_kind" in str(db.execute(f"EXPLAIN QUERY PLAN {asked}").fetchall())
    store.close()
