"""One prompt through time: what both stores find of it, and what the service says."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from fastapi.testclient import TestClient
from redis_server import redis_server  # noqa: F401

from services.likelihood.microscope.record import SampledTrajectory
from services.likelihood.microscope.through_time import spread
from services.likelihood.records import StepRecord
from services.likelihood.rest.server import create_app
from services.likelihood.store.opening import open_store
from services.likelihood.store.sqlite.store import SQLiteStore
from tests.pages.microscope_world import trajectory

ASKED = "Who founded Arl?"


@pytest.fixture(params=["sqlite", "redis"])
def store(request, tmp_path):
    url = f"sqlite:{tmp_path / 'l.db'}"
    if request.param == "redis":
        url = request.getfixturevalue("redis_server").url
    store = open_store(url, sample_steps=4)
    for info in store.runs():
        store.delete_run(info.run)
    yield store
    store.close()


def put(store, step, attempt=0):
    """A step: two groups, and from step 3 on a frozen trajectory of step 1, scored again."""
    made = [
        trajectory(f"{step}-0-0", group=f"{step}-0", fall=0.1 * step),
        trajectory(f"{step}-0-1", group=f"{step}-0", right=False, answer="Arl"),
        trajectory(f"{step}-1-0", group=f"{step}-1", question=f"{step} " + "long " * 60),
    ]
    if step >= 3:
        made.append(trajectory("1-0-0", group="1-0", fall=0.1 * step, probe=True, question="Who is frozen?"))
    store.put_samples("run", step, attempt, [SampledTrajectory.model_validate(t) for t in made])


def asked(client, **query):
    answer = client.get("/v1/runs/run/prompts/samples", params={"prompt": ASKED} | query)
    return answer.raise_for_status().json()


def test_a_prompt_is_found_in_every_kept_step_and_a_probe_first(store):
    for step in range(1, 5):
        put(store, step)
    client = TestClient(create_app(store))
    named = client.get("/v1/runs/run/prompts").json()
    assert named[:2] == [
        {"prompt": "Who is frozen?", "steps": 2, "first": 3, "last": 4, "probe": True},
        {"prompt": ASKED, "steps": 4, "first": 1, "last": 4, "probe": False},
    ]
    assert [p["prompt"] for p in named[2:]] == [(f"{step} " + "long " * 60)[:200] for step in (4, 3, 2, 1)]
    assert len(client.get("/v1/runs/run/prompts", params={"limit": 2}).json()) == 2
    found = asked(client)
    assert found["kept"] == [1, 2, 3, 4] and not found["cut"]
    assert [[t["uid"] for t in s["trajectories"]] for s in found["steps"]] == [
        [f"{step}-0-0", f"{step}-0-1"] for step in (1, 2, 3, 4)
    ]
    after = [s["trajectories"][0]["segments"][0]["logp_after"][0] for s in found["steps"]]
    assert after == pytest.approx([-0.2, -0.3, -0.4, -0.5])
    assert [s["step"] for s in asked(client, first=2, last=3)["steps"]] == [2, 3]
    assert [s["step"] for s in asked(client, limit=2)["steps"]] == [1, 4]
    long = asked(client, prompt=named[2]["prompt"])
    assert long["kept"] == [4] and long["steps"][0]["trajectories"][0]["question"].endswith("long ")
    probe = asked(client, prompt="Who is frozen?")
    assert [(s["step"], s["trajectories"][0]["probe"]) for s in probe["steps"]] == [(3, True), (4, True)]
    assert asked(client, prompt="nobody asks")["steps"] == []
    assert client.get("/v1/runs/none/prompts").status_code == 404
    assert client.get("/v1/runs/run/prompts/samples").status_code == 422


def test_probes_stand_in_no_group_of_the_step(store):
    put(store, 3)
    client = TestClient(create_app(store))
    step = client.get("/v1/runs/run/steps/3/samples").json()
    assert [g["group"] for g in step["groups"]] == ["3-0", "3-1"] and step["trajectories"] == 3


def test_prompts_go_with_their_steps(store):
    for step in range(1, 8):
        store.put_step("run", StepRecord(step=step))
        put(store, step)
    assert list(store.prompt_groups("run", ASKED)) == [1, 4, 5, 6, 7], "as the trajectories: first and newest"
    store.put_step("run", StepRecord(step=6, attempt=1))
    assert store.prompt_groups("run", ASKED) == {1: ["1-0"], 4: ["4-0"], 5: ["5-0"]}
    put(store, 6, attempt=1)
    assert list(store.prompt_groups("run", ASKED)) == [1, 4, 5, 6]
    store.delete_trajectories("run", 5)
    assert list(store.prompt_groups("run", "Who is frozen?")) == [5, 6]
    store.delete_run("run")
    store.put_step("run", StepRecord(step=1))
    assert store.prompts("run") == []


def test_a_second_part_of_a_step_adds_its_prompts(store):
    put(store, 1)
    more = [trajectory("x", group="1-7"), trajectory("y", group="1-8", question=None)]
    store.put_samples("run", 1, 0, [SampledTrajectory.model_validate(t) for t in more])
    assert store.prompt_groups("run", ASKED) == {1: ["1-0", "1-7"]}
    assert store.prompt_groups("run", "1-8") == {1: ["1-8"]}, "without a question by its group"


@contextmanager
def inside(store):
    """Yields SQL or Redis commands on what a store holds, as another version might have left it. SQLite reads
    its file anew afterwards, as a service that starts does."""
    if isinstance(store, SQLiteStore):
        with store._file.writing() as db:
            yield db.execute, None
        store._add_later_columns()
    else:
        yield None, store._redis


def forget_prompts(store, *steps):
    """Make the store what a version without prompts wrote: of some steps, otherwise of all."""
    with inside(store) as (sql, redis):
        if sql and steps:
            sql(f"DELETE FROM sample_prompt WHERE step IN ({','.join(map(str, steps))})")
        elif sql:
            sql("DROP TABLE sample_prompt")
        elif steps:
            redis.hdel("unspiral:run:run:prompts", *steps)
        else:
            redis.delete("unspiral:run:run:prompts")


def test_steps_of_an_earlier_day_gain_the_prompts_that_they_hold(store):
    for step in (1, 2, 3):
        put(store, step)
    odd = trajectory("y", group="g", question=None)
    empty = trajectory("z", group="h", question="")
    store.put_samples("run", 2, 0, [SampledTrajectory.model_validate(t) for t in (odd, empty)])
    before = store.prompts("run")
    groups = {prompt.prompt: store.prompt_groups("run", prompt.prompt) for prompt in before}
    assert len(before) == 7 and before[0].probe
    for steps in ((), (2,), (1, 3)):
        forget_prompts(store, *steps)
        assert store.prompts("run") == before
        forget_prompts(store, *steps)
        assert {prompt: store.prompt_groups("run", prompt) for prompt in groups} == groups


def test_a_second_part_keeps_the_prompts_of_a_first_that_noted_none(store):
    put(store, 1)
    forget_prompts(store)
    more = SampledTrajectory.model_validate(trajectory("x", group="1-7"))
    store.put_samples("run", 1, 0, [more])
    assert store.prompt_groups("run", ASKED) == {1: ["1-0", "1-7"]}
    assert len(store.prompts("run")) == 2


def test_prompts_of_a_step_that_an_earlier_version_dropped_are_not_named(store):
    for step in (1, 2):
        put(store, step)
    with inside(store) as (sql, redis):
        if sql:
            for table in ("sample_step", "sample"):
                sql(f"DELETE FROM {table} WHERE step=2")
        else:
            redis.hdel("unspiral:run:run:samples", 2)
            redis.delete("unspiral:run:run:samples:2")
    assert store.sampled_steps("run") == {1: 3}
    assert [(p.prompt[:4], p.steps, p.last) for p in store.prompts("run")] == [("1 lo", 1, 1), ("Who ", 1, 1)]
    assert list(store.prompt_groups("run", ASKED)) == [1]


def test_an_answer_is_bounded(store, monkeypatch):
    for step in (1, 2):
        put(store, step)
    client = TestClient(create_app(store))
    monkeypatch.setattr("services.likelihood.microscope.through_time.MOST_TRAJECTORIES", 1)
    assert [len(s["trajectories"]) for s in asked(client)["steps"]] == [1, 1]
    monkeypatch.setattr("services.likelihood.microscope.through_time.MOST_CHARS", 1000)
    found = asked(client)
    assert [s["step"] for s in found["steps"]] == [1] and found["cut"] and found["kept"] == [1, 2]


def test_steps_are_spread_with_both_ends():
    assert spread([3, 5, 9], 3) == [3, 5, 9]
    assert spread(list(range(101)), 5) == [0, 25, 50, 75, 100]
    assert spread([7, 8], 1) == [7]
