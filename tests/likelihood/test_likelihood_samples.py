"""Trajectories token by token: what both stores keep of them, and what the service says of a step."""

from __future__ import annotations

import orjson
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient
from redis_server import redis_server  # noqa: F401

from services.common.errors import UserError
from services.likelihood.exports.upkeep import export_parquet, prune
from services.likelihood.microscope.record import SampledTrajectory
from services.likelihood.records import StepRecord
from services.likelihood.rest.server import create_app
from services.likelihood.store.opening import open_store
from services.likelihood.store.redis.store import RedisStore
from tests.pages.microscope_world import trajectory


def opened(kind, request, tmp_path, **settings):
    if kind == "sqlite":
        return open_store(f"sqlite:{tmp_path / 'l.db'}", **settings)
    store = open_store(request.getfixturevalue("redis_server").url, **settings)
    for info in store.runs():
        store.delete_run(info.run)
    return store


@pytest.fixture(params=["sqlite", "redis"])
def store(request, tmp_path):
    store = opened(request.param, request, tmp_path, sample_steps=3)
    yield store
    store.close()


def sample(uid, **changes):
    return SampledTrajectory.model_validate(trajectory(uid, **changes))


def test_what_is_put_comes_back_once_and_by_group(store):
    given = [sample("a"), sample("b", right=False, answer="Arl"), sample("c", group="q2", after=False)]
    assert store.put_samples("run", 4, 0, given) == 3
    assert store.put_samples("run", 4, 0, [sample("a", fall=9.0), sample("d")]) == 1
    back = store.samples("run", 4)
    assert [t.uid for t in back] == ["a", "b", "c", "d"]
    assert back[0] == sample("a").model_copy(update={"segments": back[0].segments})
    assert back[0].written[0].logp_after == [-0.2, -0.31, -0.42, -0.53, -0.64]
    assert [t.uid for t in store.samples("run", 4, "q2")] == ["c"]
    head = store.sample_heads("run", 4)[0]
    assert head.change == pytest.approx(-(sum(0.1 + 0.01 * k for k in range(5)) + 0.46) / 9)
    assert (head.falling, head.held, head.tokens, head.searches) == (1.0, 9, 9, 1)
    assert (head.lowest.segment, head.lowest.token) == (0, 4)
    assert store.sample_heads("run", 4)[2].change is None
    assert store.sampled_steps("run") == {4: 4}
    assert store.sample_heads("run", 5) == [] and store.samples("run", 5) == []


def test_the_newest_steps_the_first_and_those_of_alarms_are_kept(store):
    store.put_step("run", StepRecord(step=0))
    store.save_monitor("run", 0, {}, [{"rule": "likelihood", "step": 2, "confidence": "high"}], {})
    for step in range(8):
        store.put_samples("run", step, 0, [sample("a")])
    assert list(store.sampled_steps("run")) == [0, 2, 5, 6, 7]
    assert store.samples("run", 1) == [] and len(store.samples("run", 2)) == 1


def test_a_higher_attempt_supersedes_and_pruning_takes_them_too(store):
    for step in range(3):
        store.put_step("run", StepRecord(step=step))
        store.put_samples("run", step, 0, [sample("a")])
    store.put_step("run", StepRecord(step=1, attempt=1))
    assert store.sampled_steps("run") == {0: 1}
    store.put_samples("run", 1, 1, [sample("x")])
    with pytest.raises(UserError, match="superseded"):
        store.put_samples("run", 1, 0, [sample("late")])
    store.delete_trajectories("run", 1)
    assert store.sampled_steps("run") == {1: 1} and store.samples("run", 0) == []
    store.delete_run("run")
    store.put_step("run", StepRecord(step=1, attempt=1))
    assert store.samples("run", 1) == []


def test_both_stores_give_the_same_answers(request, tmp_path):
    said = []
    for kind in ("sqlite", "redis"):
        store = opened(kind, request, tmp_path)
        client = TestClient(create_app(store))
        body = {"trajectories": [trajectory("a"), trajectory("b", right=False), trajectory("c", group="q2")]}
        receipt = client.post("/v1/runs/run/steps/7/samples", json=body)
        assert receipt.json() == {"run": "run", "step": 7, "attempt": 0, "stored": 3, "kept_steps": 1000}
        paths = ("samples", "steps/7/samples?rule=likelihood&order=alarm", "steps/7/samples/full")
        said.append([client.get(f"/v1/runs/run/{path}").json() for path in paths])
        store.close()
    assert said[0] == said[1]
    assert said[0][0] == [{"step": 7, "trajectories": 3}]


def test_pruned_and_exported_with_the_rest(store_of_a_step, tmp_path):
    for step in (1, 3, 9):
        store_of_a_step.put_step("run", StepRecord(step=step))
    files = export_parquet(store_of_a_step, "run", tmp_path / "out")
    kinds = ("steps.parquet", "actions.parquet", "samples.parquet", "about.json")
    assert [f.name for f in files] == [f"run-{kind}" for kind in kinds]
    rows = pq.read_table(files[2]).to_pylist()
    assert len(rows) == 3 * (1 + 6 + 1)
    words = [row for row in rows if row["step"] == 3 and row["uid"] == "a"]
    assert [row["by"] for row in words] == ["model", "environment", "model"]
    assert words[2]["text"] == "<answer> Ines Tobar </answer>" and words[0]["documents"] == ["d7"]
    assert words[0]["logp_after"][4] == pytest.approx(-0.64)
    prune(store_of_a_step, ["run"], keep_steps=1)
    assert list(store_of_a_step.sampled_steps("run")) == [9]


def test_the_groups_that_are_not_shown_are_counted_and_a_filter_changes_no_mean(client, store_of_a_step):
    def asked(**query) -> dict:
        return client.get("/v1/runs/run/steps/3/samples", params=query).raise_for_status().json()

    counts = ("trajectories", "kept_groups", "step_trajectories", "step_groups")
    assert [asked()[name] for name in counts] == [6, 3, None, None], "the step's records are not there"
    records = [
        {"uid": f"{group}-{n}", "group": f"g{group}", "reward": 0, "advantage": 0, "actions": []}
        for group in range(16)
        for n in range(5)
    ]
    body = {"step": 3, "trajectories": records}
    client.post("/v1/runs/run/steps", json=body).raise_for_status()
    assert [asked()[name] for name in counts] == [6, 3, 80, 16]
    assert [asked(which="wrong")[name] for name in counts] == [6, 3, 80, 16]
    whole = next(g for g in asked()["groups"] if [t["uid"] for t in g["trajectories"]] == ["a", "b"])
    (left,) = asked(which="wrong")["groups"]
    assert [t["uid"] for t in left["trajectories"]] == ["b"] and left["whole"] == whole["whole"]
    both = whole["trajectories"]
    assert left["whole"]["trajectories"] == 2
    for name in ("reward", "change", "searches"):
        assert left["whole"][name] == pytest.approx((both[0][name] + both[1][name]) / 2), name
    assert both[0]["reward"] != both[1]["reward"]


def test_filters_order_and_what_weighs_most(client, store_of_a_step):
    def asked(**query) -> dict:
        answer = client.get("/v1/runs/run/steps/3/samples", params=query)
        return answer.raise_for_status().json()

    def uids(**query) -> list[list[str]]:
        return [[t["uid"] for t in g["trajectories"]] for g in asked(**query)["groups"]]

    whole = asked()
    assert (whole["trajectories"], whole["matching"], whole["sources"]) == (6, 6, ["rivers", "towns"])
    assert (whole["first"], whole["previous"], whole["next"], whole["last"]) == (1, 1, 9, 9)
    assert uids() == [["a", "b"], ["c", "d"], ["e", "f"]], "mixed groups first, then by their fall"
    assert uids(order="falls") == [["c", "d"], ["e", "f"], ["a", "b"]]
    assert uids(order="longest")[0] == ["e", "f"]
    assert uids(which="wrong") == [["b"]]
    assert uids(which="invalid") == [["d"]]
    assert uids(which="truncated") == [["f"]]
    assert uids(source="rivers") == [["c", "d"]]
    assert uids(text="TOBAR in 1412", which="wrong") == [["b"]], "documents are searched"
    assert uids(text="nothing of the kind") == []
    assert asked(limit=1)["more_groups"] == 2
    for rule, uid, place in (
        ("likelihood", "c", {"segment": 0, "token": 4}),
        ("truncation", "f", {"segment": 0, "token": 4}),
        ("validity", "d", {"segment": 0, "token": 4}),
        ("collapse", "b", {"segment": 0, "token": 4}),
    ):
        found = asked(rule=rule)["heaviest"]
        assert found["uid"] == uid and {**found["place"], "nats": 0} == {**place, "nats": 0}, rule
    assert asked(which="right", source="nowhere")["heaviest"] is None


@pytest.fixture
def store_of_a_step(tmp_path):
    store = open_store(f"sqlite:{tmp_path / 'l.db'}")
    given = [
        sample("a"),
        sample("b", right=False, answer="Arl"),
        sample("c", group="q2", fall=0.5, data_source="rivers", answer="Ines Tobar", valid=True),
        sample("d", group="q2", fall=0.0, data_source="rivers", valid=False),
        sample("e", group="q3", fall=0.2, answer="Ines Maria Tobar of Arl"),
        sample("f", group="q3", fall=0.2, finish="length"),
    ]
    for step in (1, 3, 9):
        store.put_samples("run", step, 0, given if step == 3 else given[:1])
    yield store
    store.close()


@pytest.fixture
def client(store_of_a_step):
    return TestClient(create_app(store_of_a_step))


def segment(**fields) -> dict:
    return {"segments": [{"by": "model"} | fields]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"uid": ""}, "trajectories.0.uid"),
        ({"reward": "1"}, "reward: expected a number"),
        ({"right": 1}, "trajectories.0.right"),
        ({"advantage": None}, "trajectories.0.advantage"),
        ({"colour": "red"}, "trajectories.0.colour: unknown key"),
        (segment(tokens=["a"], logp_before=[]), "logp_before: 0 values for 1 tokens"),
        (segment(tokens=["a"], logp_before=[0.5]), "less than or equal"),
        (segment(tokens=["a"], logp_before=[-1], held=[1]), "held: index 1 of 1"),
        (segment(by="nobody"), "trajectories.0.segments.0"),
        (segment(**{f"k{i}": 1 for i in range(70)}), "an object of 71 keys; at most 64"),
    ],
)
def test_a_bad_post_is_refused_in_one_line_and_changes_nothing(client, store_of_a_step, change, said):
    body = {"trajectories": [trajectory("new") | change]}
    answer = client.post("/v1/runs/run/steps/3/samples", json=body)
    assert answer.status_code == 422 and said in answer.json()["detail"]
    assert "\n" not in answer.json()["detail"] and len(store_of_a_step.samples("run", 3)) == 6


def test_a_step_cannot_be_filled_without_end(client, store_of_a_step, monkeypatch):
    monkeypatch.setattr("services.likelihood.microscope.packing.MAX_STEP_SAMPLES", 6)
    answer = client.post("/v1/runs/run/steps/3/samples", json={"trajectories": [trajectory("g")]})
    assert answer.status_code == 422 and "at most 6" in answer.json()["detail"]
    assert len(store_of_a_step.samples("run", 3)) == 6


def test_groups_are_counted_without_reading_a_record(store, monkeypatch):
    def post(uids, attempt=0):
        rows = [{"uid": u, "group": u[0], "reward": 0, "advantage": 0, "actions": []} for u in uids]
        store.put_step(
            "run", StepRecord.model_validate({"step": 1, "attempt": attempt, "trajectories": rows})
        )

    def counted():
        with monkeypatch.context() as patched:
            patched.setattr(store, "trajectories", None)
            return store.trajectory_counts("run", 1)

    post(["a1", "a2", "b1"])
    post(["b1", "b2", "c1"])  # the same step in parts
    assert counted() == (5, 3) and store.steps("run", 1, 1)[0].trajectories == 5
    post(["d1"], attempt=1)
    assert counted() == (1, 1)
    assert store.trajectory_counts("run", 2) == (0, 0)
    if isinstance(store, RedisStore):
        body = orjson.loads(store._redis.hget("unspiral:run:run:steps", 1))
        fields = {"attempt", "policy_version", "time", "posted", "derived", "trajectories"}
        assert set(body) == fields, "a service of an earlier version reads no others"
        store._redis.hdel("unspiral:run:run:groups", 1)  # as such a service leaves it
        assert store.trajectory_counts("run", 1) == (1, 1)
        store._redis.hset("unspiral:run:run:groups", 1, b"[2,2]")  # such a one has written the step again
        assert store.trajectory_counts("run", 1) == (1, 1)
        post(["d1", "e1"], attempt=1)
        assert counted() == (2, 2)
    store.delete_trajectories("run", 2)
    assert counted() == (0, 0)
