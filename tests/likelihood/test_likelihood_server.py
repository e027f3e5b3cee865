"""The service over HTTP: what it accepts, what it refuses and how, what it says of a run."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from likelihood_service import client, store  # noqa: F401

from services.common.errors import UserError
from services.common.http.auth import COOKIE
from services.contracts import TokenBatch
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from services.likelihood.rest.server import MAX_STEP_BYTES, create_app
from services.likelihood.wire.tokens import pack_tokens

ACTION = {"tokens": 2, "logp_before": -1.0, "logp_after": -1.5, "documents": None}


def step(n, attempt=0, uid="a", **changes):
    trajectory = {
        "uid": uid,
        "group": "g",
        "reward": 1.0,
        "advantage": 0.5,
        "tool_rounds": 1,
        "actions": [ACTION],
    }
    return {
        "step": n,
        "attempt": attempt,
        "policy_version": n,
        "metrics": {"reward/mean": 0.5},
        "trajectories": [trajectory],
        **changes,
    }


def post(client, body, run="run"):
    return client.post(f"/v1/runs/{run}/steps", json=body)


def test_the_first_post_makes_the_run_and_the_same_post_twice_is_stored_once(client):
    assert client.get("/v1/runs").json() == []
    assert post(client, step(0)).json() == {
        "run": "run",
        "step": 0,
        "attempt": 0,
        "stored": 1,
        "superseded": 0,
    }
    assert post(client, step(0)).json()["stored"] == 0
    (run,) = client.get("/v1/runs").json()
    assert (run["run"], run["steps"], run["trajectories"]) == ("run", 1, 1)


def test_parts_of_a_step_are_merged_and_its_metrics_cover_all_of_it(client):
    post(client, step(0, uid="a", metrics={}))
    post(client, step(0, uid="b", metrics={"mine": 3.0}))
    (stored,) = client.get("/v1/runs/run/steps").json()
    assert stored["trajectories"] == 2 and stored["metrics"]["mine"] == 3.0
    wrong = {
        "uid": "c",
        "group": "g",
        "reward": 0.0,
        "advantage": -1,
        "tool_rounds": 0,
        "actions": [{"tokens": 4, "logp_before": -8.0}],
    }
    post(client, {"step": 0, "trajectories": [wrong]})
    metrics = client.get("/v1/runs/run/summary").json()["metrics"]
    assert (
        metrics["logp/right"] == -0.5
        and metrics["logp/wrong"] == -2.0
        and metrics["reward/mean"] == pytest.approx(2 / 3)
    )
    assert [t["uid"] for t in client.get("/v1/runs/run/steps/0/trajectories").json()] == ["a", "b", "c"]


def test_a_metric_that_was_posted_wins_over_the_one_worked_out(client):
    post(client, step(0))
    assert client.get("/v1/runs/run/summary").json()["metrics"]["reward/mean"] == 0.5


def test_a_higher_attempt_supersedes_all_steps_from_its_own_on(client):
    for n in range(6):
        post(client, step(n, metrics={"reward/mean": n}))
    assert post(client, step(3, attempt=1, metrics={"reward/mean": 30})).json()["superseded"] == 3
    series = client.get("/v1/runs/run/series?names=reward/mean").json()
    assert (
        series["step"] == [0, 1, 2, 3]
        and series["series"]["reward/mean"]["mean"] == [0, 1, 2, 30]
        and series["attempt"] == 1
    )
    late = post(client, step(4, attempt=0))
    assert late.status_code == 409 and "attempt 1, which began at step 3" in late.json()["detail"]
    assert post(client, step(2, attempt=0)).status_code == 200  # before the new attempt began
    assert [s["step"] for s in client.get("/v1/runs/run/steps").json()] == [0, 1, 2, 3]


def test_phase_and_alarms_follow_the_posts_and_a_superseding_attempt(client):
    for n in range(9):
        post(client, step(n, metrics={"probe/lag": -0.2}))
    now = client.get("/v1/runs/run/phase").json()
    assert now["phase"] == "decay" and now["bands"][0] == {
        "phase": "unknown",
        "first": 0,
        "last": now["since"] - 1,
    }
    (alarm,) = client.get("/v1/runs/run/alarms").json()
    assert alarm["metric"] == "probe/lag" and alarm["cleared"] is None
    post(client, step(3, attempt=1, metrics={"probe/lag": 0.0}))
    assert client.get("/v1/runs/run/phase").json()["bands"] == [{"phase": "unknown", "first": 0, "last": 3}]
    assert client.get("/v1/runs/run/alarms").json() == []


def test_a_metric_named_step_does_not_move_the_alarms(client):
    for n in range(9):
        post(client, step(n, metrics={"step": 1e6 + n, "probe/lag": -0.2}))
    (alarm,) = client.get("/v1/runs/run/alarms").json()
    assert alarm["since"] <= alarm["step"] <= 8


def test_the_monitor_goes_on_over_a_restart_of_the_service(client, store):
    for n in range(5):
        post(client, step(n, metrics={"probe/lag": -0.2}))
    again = TestClient(create_app(store))
    for n in range(5, 8):
        post(again, step(n, metrics={"probe/lag": -0.2}))
    assert [a["step"] for a in again.get("/v1/runs/run/alarms").json()] == [6]


def one_trajectory(*actions, **fields):
    """The body of a step of one trajectory."""
    return step(
        0, trajectories=[{"uid": "a", "group": "g", "advantage": 0, "actions": list(actions)} | fields]
    )


BAD = {
    "a log-prob that is not a number": (
        one_trajectory({"tokens": 1, "logp_before": float("nan")}),
        "logp_before: expected a finite log-prob <= 0",
    ),
    "a positive log-prob": (
        one_trajectory({"tokens": 1, "logp_before": 0.5}),
        "logp_before: expected a finite log-prob <= 0",
    ),
    "a negative count": (
        one_trajectory({"tokens": -1, "logp_before": -1}),
        "tokens: Input should be greater than or equal to 0",
    ),
    "negative tool rounds": (one_trajectory(tool_rounds=-1), "tool_rounds"),
    "an infinite advantage": (
        one_trajectory(advantage=float("inf")),
        "advantage: expected a finite number",
    ),
    "a negative step": (step(-1), "step: Input should be greater than or equal to 0"),
    "a negative attempt": (step(0, attempt=-1), "attempt"),
    "a misspelt key": (step(0, metric={}), "metric: unknown key; accepted are step, attempt,"),
    "a misspelt key that may be left out": (
        one_trajectory(rewrad=1.0),
        "trajectories.0.rewrad: unknown key; accepted are uid, group, reward, advantage, right, tool_rounds, "
        "actions; did you mean reward?",
    ),
    "a misspelt key that is missed": (
        one_trajectory({"tokens": 1, "log_before": -1}),
        "trajectories.0.actions.0.log_before: unknown key; accepted are tokens, logp_before, logp_after, "
        "documents; did you mean logp_before?",
    ),
    "a metric that is text": (step(0, metrics={"phase": "healthy"}), "metrics.phase"),
    "no step": ({"metrics": {}}, "step: required"),
    "a list": ([1], "should be an object"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_post_gets_a_422_that_says_what_is_accepted_and_changes_nothing(client, what):
    body, says = BAD[what]
    post(client, step(0))
    before = client.get("/v1/runs/run/summary").json()
    answer = client.post(
        "/v1/runs/run/steps", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert (
        answer.status_code == 422 and says in answer.json()["detail"] and "\n" not in answer.json()["detail"]
    )
    assert client.get("/v1/runs/run/summary").json() == before
    fresh = client.post("/v1/runs/other/steps", content=json.dumps(body))
    assert fresh.status_code == 422 and len(client.get("/v1/runs").json()) == 1


def test_a_metric_that_is_not_finite_is_stored_as_null(client):
    client.post(
        "/v1/runs/run/steps", content='{"step": 0, "metrics": {"grad_norm": NaN, "x": Infinity, "y": 1}}'
    )
    assert client.get("/v1/runs/run/summary").json()["metrics"] == {"grad_norm": None, "x": None, "y": 1}


def test_bodies_above_the_limit_get_a_413_that_says_it(client):
    answer = client.post("/v1/runs/run/steps", content=b"x" * (100 << 20))
    assert answer.status_code == 413 and str(MAX_STEP_BYTES) in answer.json()["detail"]
    chunked = client.post(
        "/v1/runs/run/steps", content=(b"x" * (1 << 20) for _ in range(40))
    )  # no length declared
    assert chunked.status_code == 413 and str(MAX_STEP_BYTES) in chunked.json()["detail"]
    assert client.get("/v1/runs").json() == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/runs/nowhere/phase", 404),
        ("GET", "/v1/runs/nowhere/stream", 404),
        ("GET", "/v1/runs/nowhere/alarms", 404),
        ("GET", "/v1/runs/..%2Fetc/summary", 404),
        ("GET", "/v1/runs/a%20b/summary", 422),
        ("GET", "/v1/nothing", 404),
        ("DELETE", "/v1/runs", 405),
        ("POST", "/v1/runs/run/steps", 422),
        ("GET", "/v1/runs/run/series?points=0", 422),
    ],
)
def test_errors_are_json_with_one_line(client, method, path, status):
    answer = client.request(method, path)
    assert (
        answer.status_code == status
        and set(answer.json()) == {"detail"}
        and "\n" not in answer.json()["detail"]
    )


def tokens(**changes):
    batch = TokenBatch(
        ["a", "b"], np.array([0, 2, 3]), np.arange(3, dtype=np.int32), np.array([-1, 0, 0], np.int16),
        logp_old=np.array([0, -1, -2], np.float32),
    )  # fmt: skip
    for name, value in changes.items():
        setattr(batch, name, value)
    return pack_tokens(batch)


def test_token_arrays_of_the_newest_steps_are_kept(client):
    for n in range(5):
        assert client.put(f"/v1/runs/run/steps/{n}/tokens", content=tokens()).status_code == 201
    assert [client.get(f"/v1/runs/run/steps/{n}/tokens").status_code for n in range(5)] == [
        404,
        404,
        200,
        200,
        200,
    ]
    assert client.get("/v1/runs/run/steps/4/tokens").content == tokens()
    client.put("/v1/runs/run/steps/3/tokens?attempt=1", content=tokens())
    assert client.get("/v1/runs/run/steps/4/tokens").status_code == 404  # superseded with its attempt


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"nonsense", "expected an npz body"),
        (tokens(logp_old=np.array([0, np.nan, -1], np.float32)), "logp_old: expected finite log-probs <= 0"),
        (tokens(logp_old=np.array([0, 3, -1], np.float32)), "logp_old: expected finite log-probs <= 0"),
        (tokens(offsets=np.array([0, 9, 3])), "offsets"),
        (tokens(uid=["a"]), "offsets: expected 2 rising values"),
        (tokens(action_ids=np.array([0], np.int16)), "action_ids: 1 values for 3 tokens"),
        (tokens(advantages=np.zeros(7)), "advantages: expected 2 values"),
    ],
)
def test_bad_token_arrays_are_refused(client, body, says):
    answer = client.put("/v1/runs/run/steps/0/tokens", content=body)
    assert answer.status_code == 422 and says in answer.json()["detail"]
    assert client.get("/v1/runs").json() == []


def test_curves_of_100000_steps_are_thinned_and_keep_their_extremes(store):
    from services.likelihood.store import series

    n = 100_000
    with store._file.writing() as db:
        run_id, _ = store._enter(db, "long", 0, 0)
        values = np.full(-(-n // series.CHUNK) * series.CHUNK, np.nan)
        values[:n] = np.sin(np.arange(n) / 900)
        values[54_321] = 40.0
        db.executemany(
            "INSERT INTO chunk (run, name, chunk, data) VALUES (?, 'x', ?, ?)",
            [
                (run_id, i, values[i * series.CHUNK : (i + 1) * series.CHUNK].tobytes())
                for i in range(len(values) // series.CHUNK)
            ],
        )
        db.executemany(
            "INSERT INTO step (run, step, attempt, time, posted, derived, trajectories) "
            "VALUES (?,?,0,0,'{}','{}',0)",
            [(run_id, i) for i in (0, n - 1)],
        )
    got = TestClient(create_app(store)).get("/v1/runs/long/series?names=x&points=500").json()
    assert 250 <= len(got["step"]) <= 500 and got["stride"] == 201
    assert max(got["series"]["x"]["max"]) == 40.0 and min(got["series"]["x"]["min"]) == pytest.approx(
        -1, abs=1e-3
    )
    part = (
        TestClient(create_app(store))
        .get("/v1/runs/long/series?names=x&first=54000&last=54400&points=500")
        .json()
    )
    assert part["stride"] == 1 and part["series"]["x"]["mean"][321] == 40.0


def test_events_are_kept_in_order(client):
    post(client, step(0))
    for n in range(3):
        client.post("/v1/runs/run/events", json={"step": n, "kind": "worker_lost", "text": f"w{n}"})
    assert [e["text"] for e in client.get("/v1/runs/run/events").json()] == ["w0", "w1", "w2"]
    assert client.post("/v1/runs/other/events", json={"step": 0, "kind": "x", "text": "y"}).status_code == 201
    assert (
        client.get("/v1/runs/other/summary").json()["steps"] == 0
        and client.get("/v1/runs/other/phase").json()["phase"] == "unknown"
    )
    assert client.get("/v1/runs/other/series").json()["step"] == []


def test_prometheus_shows_the_run_and_the_service(client):
    for n in range(8):
        post(client, step(n, metrics={"probe/lag": -0.2}))
    text = client.get("/metrics").text
    assert 'unspiral_run_metric{name="probe/lag",run="run"} -0.2' in text
    assert (
        'unspiral_run_phase{phase="decay",run="run"} 1.0' in text
        and 'unspiral_run_alarms{run="run"} 1.0' in text
    )
    assert (
        "unspiral_likelihood_steps_total 8.0" in text and "unspiral_likelihood_trajectories_total 8.0" in text
    )


def test_health_and_readiness(client, store):
    assert client.get("/healthz").json() == {"status": "ok"} and client.get("/readyz").status_code == 200
    assert client.get("/openapi.json").json()["info"]["title"] == "Unspiral likelihood service"
    docs = client.get("/docs").text
    assert "<title>Unspiral likelihood: API</title>" in docs and "<h2>Likelihood service: API</h2>" in docs
    assert "openapi.json" in docs and "http" not in client.get("/").text.replace("http-equiv", "")


def test_a_token_is_asked_for_everywhere_but_in_health(store):
    client = TestClient(create_app(store, token="s3cret"))
    assert client.get("/healthz").status_code == 200 and client.get("/readyz").status_code == 200
    for path in ("/v1/runs", "/metrics", "/docs", "/", "/static/page.js", "/openapi.json"):
        assert client.get(path).status_code == 401, path
    assert post(client, step(0)).status_code == 401
    assert client.get("/v1/runs", headers={"Authorization": "Bearer wrong"}).status_code == 401
    right = {"Authorization": "Bearer s3cret"}
    assert client.get("/v1/runs", headers=right).status_code == 200
    assert client.post("/v1/runs/run/steps", json=step(0), headers=right).status_code == 200


def test_a_browser_logs_in_by_a_form_and_its_cookie_only_reads(store):
    client = TestClient(create_app(store, token="s3cret"))
    sent = client.get("/", headers={"Accept": "text/html"}, follow_redirects=False)
    assert sent.status_code == 303 and sent.headers["location"] == "/login"
    wrong = client.post("/login", data={"token": "no"})
    assert wrong.status_code == 401 and COOKIE not in client.cookies
    answer = client.post("/login", data={"token": "s3cret"}, follow_redirects=False)
    cookie = answer.headers["set-cookie"].lower()
    assert (
        answer.status_code == 303
        and "httponly" in cookie
        and "samesite=strict" in cookie
        and "s3cret" not in cookie
    )
    assert client.get("/v1/runs").status_code == 200 and client.get("/").status_code == 200
    assert post(client, step(0)).status_code == 401


def test_a_foreign_page_cannot_post(client):
    headers = {"Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"}
    answer = client.post("/v1/runs/run/steps", content=json.dumps(step(0)), headers=headers)
    assert answer.status_code == 403 and client.get("/v1/runs").json() == []


def test_a_wider_address_without_a_token_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("UNSPIRAL_API_TOKEN", raising=False)
    with pytest.raises(UserError, match="UNSPIRAL_API_TOKEN") as caught:
        serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), host="0.0.0.0", port=0))
    assert caught.value.exit_code == 2


def test_the_stream_tells_steps_and_alarms_as_they_happen(tmp_path):
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0))
    with httpx.Client(base_url=server.url, timeout=60) as client:
        client.post("/v1/runs/run/steps", json=step(0))
        seen = []
        with client.stream("GET", "/v1/runs/run/stream") as stream:
            for line in stream.iter_lines():
                if line.startswith("event:"):
                    seen.append(line.split(": ")[1])
                if line == "event: hello":
                    for n in range(1, 8):
                        httpx.post(
                            f"{server.url}/v1/runs/run/steps", json=step(n, metrics={"probe/lag": -0.2})
                        )
                if "alarm" in seen:
                    break
    assert seen[:1] == ["hello"] and seen.count("step") == 7
    server.stop()


def test_two_services_on_one_store_see_each_others_steps(store):
    first, second = TestClient(create_app(store)), TestClient(create_app(store))
    for n in range(8):
        post(first if n % 2 else second, step(n, metrics={"probe/lag": -0.2}))
    for replica in (first, second):
        assert [a["step"] for a in replica.get("/v1/runs/run/alarms").json()] == [6]
        assert replica.get("/v1/runs/run/phase").json()["bands"][-1] == {
            "phase": "decay",
            "first": 6,
            "last": 7,
        }


def test_a_trainer_that_posts_no_rewards_gets_no_share_of_groups_and_no_alarm_about_them(client):
    action = {"tokens": 2, "logp_before": -1.0, "logp_after": -0.9}
    made = [
        {"uid": uid, "group": "g", "reward": None, "advantage": advantage, "actions": [action]}
        for uid, advantage in (("a", 1.0), ("b", -1.0))
    ]
    for step in range(12):
        body = {"step": step, "metrics": {"policy/clip_fraction": 1.0}, "trajectories": made}
        assert client.post("/v1/runs/run/steps", json=body).status_code == 200
    metrics = client.get("/v1/runs/run/summary").json()["metrics"]
    assert metrics["logp/right"] == -0.5 and not {"groups/zero_variance", "reward/mean"} & set(metrics)
    assert client.get("/v1/runs/run/alarms").json() == []
