"""What a run says of itself and what people call it: over REST, in both stores, exported, deleted."""

from __future__ import annotations

import json

import pytest
from fastapi.testclient import TestClient
from likelihood_addresses import url  # noqa: F401
from redis_server import redis_server  # noqa: F401

from services.likelihood.client import LikelihoodClient
from services.likelihood.exports.upkeep import export_parquet
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from services.likelihood.rest.server import create_app
from services.likelihood.store.base import NotStored
from services.likelihood.store.opening import open_store
from services.likelihood.wire.about import AboutRecord


@pytest.fixture
def store(url):
    store = open_store(url)
    yield store
    store.close()


@pytest.fixture
def client(store):
    return TestClient(create_app(store))


def post_step(client, run="a", step=0):
    body = {"step": step, "metrics": {"reward/mean": 0.5}}
    assert client.post(f"/v1/runs/{run}/steps", json=body).status_code == 200


def test_keys_that_are_posted_replace_those_before_and_the_others_stay(client):
    first = {"config": {"seed": 1, "llds": {"lambda": 0.5}}, "commit": "abc", "started": 5.0, "ended": 9.0}
    assert client.post("/v1/runs/a/about", json=first).status_code == 201
    again = {"started": 20.0, "ended": None, "steps": 40}
    assert client.post("/v1/runs/a/about", json=again).status_code == 201
    found = client.get("/v1/runs/a/about").json()
    assert found["config"] == first["config"] and found["commit"] == "abc" and found["steps"] == 40
    assert (found["started"], found["ended"], found["exit"]) == (20.0, None, None)
    listed = client.get("/v1/runs").json()
    assert [(r["run"], r["steps"], r["last_step"]) for r in listed] == [("a", 0, None)]


def test_labels_are_kept_and_do_not_count_as_a_post(client):
    post_step(client, "a")
    post_step(client, "b")
    changed = client.patch("/v1/runs/a", json={"title": "plain <b>GRPO</b>", "tags": ["seed 1", "paper"]})
    assert changed.json()["title"] == "plain <b>GRPO</b>"
    hidden = client.patch("/v1/runs/a", json={"hidden": True}).json()
    assert (hidden["title"], hidden["tags"], hidden["hidden"]) == (
        "plain <b>GRPO</b>",
        ["seed 1", "paper"],
        True,
    )
    listed = client.get("/v1/runs").json()
    assert [r["run"] for r in listed] == ["b", "a"]  # by the newest post, and hidden ones too
    assert client.get("/v1/runs/a/summary").json()["hidden"] is True
    assert client.patch("/v1/runs/a", json={"title": None}).json()["title"] is None
    assert client.patch("/v1/runs/none", json={"hidden": True}).status_code == 404
    assert client.get("/v1/runs/none/about").status_code == 404


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({"titel": "x"}, "titel: unknown key"),
        ({"title": "two\nlines"}, "title"),
        ({"tags": ["x"] * 21}, "tags"),
        ({"tags": [""]}, "tags.0"),
        ({"hidden": "perhaps"}, "hidden"),
    ],
)
def test_a_bad_label_is_refused_with_its_key_and_changes_nothing(client, body, key):
    post_step(client)
    answer = client.patch("/v1/runs/a", json=body)
    assert answer.status_code == 422 and answer.json()["detail"].startswith(key)
    found = client.get("/v1/runs/a/summary").json()
    assert (found["title"], found["tags"], found["hidden"]) == (None, [], False)


def test_a_deleted_run_is_gone_and_a_new_one_of_its_name_starts_afresh(client):
    for step in range(30):
        post_step(client, "a", step)
    client.patch("/v1/runs/a", json={"title": "old"})
    client.post("/v1/runs/a/about", json={"commit": "abc"})
    assert client.delete("/v1/runs/a").status_code == 200
    assert client.delete("/v1/runs/a").status_code == 404
    assert client.get("/v1/runs").json() == []
    post_step(client, "a", 0)
    found = client.get("/v1/runs/a/summary").json()
    assert (found["steps"], found["last_step"], found["title"]) == (1, 0, None)
    assert client.get("/v1/runs/a/about").json()["commit"] is None
    assert client.get("/v1/runs/a/series").json()["series"]["reward/mean"]["mean"] == [0.5]


def test_with_a_token_the_cookie_of_the_page_may_read_but_not_change(tmp_path):
    store = open_store(f"sqlite:{tmp_path / 'l.db'}")
    client = TestClient(create_app(store, token="s3cret"))
    bearer = {"Authorization": "Bearer s3cret"}
    client.post("/v1/runs/a/about", json={"commit": "abc"}, headers=bearer)
    client.post("/login", content="token=s3cret", follow_redirects=False)
    assert client.get("/v1/runs/a/about").json()["commit"] == "abc"
    assert client.patch("/v1/runs/a", json={"hidden": True}).status_code == 401
    assert client.delete("/v1/runs/a").status_code == 401
    assert client.delete("/v1/runs/a", headers=bearer).status_code == 200
    store.close()


def test_an_export_holds_what_the_run_said_and_its_labels(store, tmp_path):
    client = TestClient(create_app(store))
    post_step(client)
    client.post("/v1/runs/a/about", json={"config": {"seed": 3}, "versions": {"torch": "2.1"}})
    client.patch("/v1/runs/a", json={"tags": ["kept"], "hidden": True})
    about = next(p for p in export_parquet(store, "a", tmp_path / "out") if p.name == "a-about.json")
    found = json.loads(about.read_text())
    assert found["config"] == {"seed": 3} and found["versions"] == {"torch": "2.1"}
    assert (found["run"], found["tags"], found["hidden"]) == ("a", ["kept"], True)


def test_the_client_hands_over_only_the_keys_that_are_set(tmp_path):
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0))
    with LikelihoodClient(server.url, spool_dir=tmp_path / "spool") as client:
        client.post_about("a", AboutRecord(config={"seed": 1}, started=1.0, ended=None))
        client.post_about("a", AboutRecord(ended=7.0, exit=3))
        assert client.flush(60)
    store = open_store(str(tmp_path / "l.db"))
    assert store.about("a") == {"config": {"seed": 1}, "started": 1.0, "ended": 7.0, "exit": 3}
    store.close()
    server.stop()


def test_a_configuration_that_json_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="64 bits"):
        AboutRecord(config={"seed": 2**70})


def test_labels_that_arrive_after_the_run_was_deleted_make_no_run(store, monkeypatch):
    store.put_about("gone", {"seed": 1})
    store.delete_run("gone")
    with monkeypatch.context() as patch, pytest.raises(NotStored):
        patch.setattr(store, "_known", lambda run: None, raising=False)  # it was there a moment ago
        store.put_labels("gone", {"title": "ghost"})
    store.put_about("gone", {"seed": 2})
    assert store.info("gone").title is None
