"""A likelihood store whose file is whole for SQLite, and holds a record that is none any more."""

import sqlite3

import pytest
from command_line import run  # noqa: F401
from microscope_world import trajectory

from services.common.errors import EnvironmentLacks
from services.likelihood.microscope.record import SampledTrajectory
from services.likelihood.records import StepRecord
from services.likelihood.store.opening import open_store


@pytest.fixture
def damaged(tmp_path):
    """A function that spoils one column of a store with a step and its sampled trajectories."""
    file = tmp_path / "likelihood.db"
    store = open_store(str(file))
    store.put_step("r", StepRecord(step=1, metrics={"reward/mean": 0.5}))
    store.put_samples("r", 1, 0, [SampledTrajectory.model_validate(trajectory("000001-0000-00"))])
    store.put_about("r", {"title": "mine"})
    store.close()

    def spoil(table, column):
        with sqlite3.connect(file) as db:
            assert db.execute(f"UPDATE {table} SET {column} = ?", (b"\xff{",)).rowcount > 0
        db.close()
        return file

    return spoil


READS = {
    ("sample", "body"): lambda store: store.samples("r", 1),
    ("sample", "head"): lambda store: store.sample_heads("r", 1),
    ("run_facts", "body"): lambda store: store.about("r"),
}


@pytest.mark.parametrize("place", READS, ids="-".join)
def test_it_is_told_in_one_line(damaged, place):
    file = damaged(*place)
    store = open_store(str(file))
    with pytest.raises(EnvironmentLacks) as told:
        READS[place](store)
    store.close()
    assert str(told.value) == f"likelihood store {file}: is damaged, a record in it cannot be read"


def test_what_is_whole_is_read_all_the_same(damaged):
    store = open_store(str(damaged("sample", "body")))
    assert store.about("r") == {"title": "mine"} and len(store.sample_heads("r", 1)) == 1
    store.close()


def test_an_export_says_so(run, damaged, tmp_path):
    file = damaged("sample", "body")
    told = f"unspiral: likelihood store {file}: is damaged, a record in it cannot be read\n"
    assert run("likelihood", "export", str(tmp_path / "out"), "--store", str(file)) == (3, "", told)
