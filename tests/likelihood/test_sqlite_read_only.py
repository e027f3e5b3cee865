"""Another user's store, which may be read and not written."""

import os
import sqlite3

import pytest
from command_line import run  # noqa: F401

from services.common.errors import EnvironmentLacks, UserError
from services.likelihood.records import StepRecord
from services.likelihood.store.opening import open_store


@pytest.fixture
def others(tmp_path, monkeypatch):
    """A store with one step, in a folder of another user's, where root may not write either."""
    folder = tmp_path / "theirs"
    store = open_store(str(folder / "likelihood.db"))
    store.put_step("r", StepRecord(step=1, metrics={"reward/mean": 0.5}))
    store.close()
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(folder) not in str(path) and may(path, mode))
    folder.chmod(0o555)
    yield folder / "likelihood.db"
    folder.chmod(0o755)


def test_it_is_read_and_nothing_is_made_beside_it(others):
    before = others.read_bytes()
    store = open_store(str(others))
    assert [(one.run, one.steps) for one in store.runs()] == [("r", 1)]
    assert [file.name for file in others.parent.iterdir()] == ["likelihood.db"]
    with pytest.raises(EnvironmentLacks) as refused:
        store.put_step("r", StepRecord(step=2))
    assert str(refused.value) == f"likelihood store {others}: may not be written by this user"
    store.close()
    assert others.read_bytes() == before


def test_what_a_writer_has_not_folded_into_the_file_yet_is_read_too(tmp_path, monkeypatch):
    writer = open_store(str(tmp_path / "likelihood.db"))
    writer.put_step("r", StepRecord(step=1))
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(tmp_path) not in str(path) and may(path, mode))
    assert (tmp_path / "likelihood.db-wal").stat().st_size > 0
    reader = open_store(str(tmp_path / "likelihood.db"))
    assert [(one.run, one.steps) for one in reader.runs()] == [("r", 1)]
    reader.close()
    writer.close()


def test_the_commands_that_read_take_it_and_that_which_writes_says_why(run, others, tmp_path):
    status, out, err = run("likelihood", "export", str(tmp_path / "out"), "--store", str(others))
    assert (status, err) == (0, "") and "r-steps.parquet" in out
    told = (3, "", f"unspiral: likelihood store {others}: may not be written by this user\n")
    assert run("likelihood", "prune", "--store", str(others), "--keep-steps", "1") == told


def test_a_file_of_something_else_is_told_as_ever(others):
    others.parent.chmod(0o755)
    others.unlink()
    with sqlite3.connect(others) as db:
        db.execute("CREATE TABLE other (a)")
    db.close()
    with pytest.raises(UserError, match="a SQLite database of something else"):
        open_store(str(others))
    others.unlink()
    others.touch()
    with pytest.raises(UserError, match="is empty, and may not be written"):
        open_store(str(others))
