"""A store that an earlier version wrote holds no counts of values: they are counted in what is stored."""

from __future__ import annotations

import pytest
from test_likelihood_undecided import after, row

from services.likelihood.records import StepRecord
from services.likelihood.service import LikelihoodService
from services.likelihood.store.sqlite.store import SQLiteStore


@pytest.fixture
def store(tmp_path):
    made = SQLiteStore(tmp_path / "likelihood.db")
    yield made
    made.close()


def record(step):
    metrics = row(step)
    return StepRecord(step=metrics.pop("step"), metrics=metrics)


def by_an_earlier_version(store, steps):
    """The store after so many steps, without the counts."""
    service = LikelihoodService(store)
    for step in range(1, steps + 1):
        service.put_step("r", record(step))
    step, state = store.load_monitor("r", steps + 1)
    assert state.pop("counts")
    store.save_monitor("r", step, state, [], {})


@pytest.mark.parametrize("steps", [1, 3, 60])
def test_the_live_page_says_what_the_report_says(store, steps):
    by_an_earlier_version(store, steps)
    found = LikelihoodService(store).judged("r")["undecided"]
    assert found == after(steps).undecided() and "retrieval" in found


def test_a_run_that_goes_on_keeps_what_it_has_seen(store):
    by_an_earlier_version(store, 3)
    service = LikelihoodService(store)
    service.put_step("r", record(4))
    assert service.judged("r")["undecided"] == after(4).undecided()


def test_values_that_cannot_be_one_are_not_counted(store):
    service = LikelihoodService(store)
    for step in range(1, 4):
        service.put_step("r", StepRecord(step=step, metrics={"rollout/valid": 97.0, "reward/mean": None}))
    expected = service.judged("r")["undecided"]
    step, state = store.load_monitor("r", 4)
    del state["counts"]
    store.save_monitor("r", step, state, [], {})
    again = LikelihoodService(store).judged("r")["undecided"]
    assert again == {rule: why for rule, why in expected.items() if rule in again}
    assert again["validity"] == "no rollout/valid or rollout/finished recorded"
