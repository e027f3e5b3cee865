"""A run's folder that is moved, removed or replaced in mid-run: the last step is saved, the run ends with 3,
and nothing is written to another run's folder. Scripted steps on a real folder."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import shutil

import pytest
from rich.console import Console
from test_reliability_driver import Halting, watching
from test_trainer_monitor_actions import Scripted, system
from test_trainer_stopping import started

from services.common.errors import EnvironmentLacks, UnspiralError, UserError
from trainer.learner.checkpoint import latest
from trainer.loop.run.run_folder import RunFolder
from trainer.session import run as runs


class Losing(Scripted):
    """In the middle of step 4 something happens to the folder."""

    def __init__(self, system, wants, happens):
        super().__init__(system, wants)
        self.happens = happens

    async def one_step(self, step):
        if step == 4:
            self.happens(self.config.run_dir)
        self.system.folder.trajectories(step, [], [])
        return await super().one_step(step)


def moved(run):
    run.rename(run.with_name("moved"))


def moved_and_replaced(run):
    moved(run)
    another(run)


def removed_and_replaced(run):
    shutil.rmtree(run)
    another(run)


def another(run):
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 99}\n')


def ended(tmp_path, monkeypatch, happens):
    """A run to whose folder that happens: its last line, and what it printed."""
    made = system(tmp_path)
    made.folder.close()
    made.folder.metrics_path.unlink(missing_ok=True)
    started(made, monkeypatch, lambda system, wants: Losing(system, wants, happens))
    monkeypatch.setattr(runs, "announced", lambda control, driver: contextlib.nullcontext())
    out = io.StringIO()
    with pytest.raises(EnvironmentLacks) as caught:
        runs.train(made.config, console=Console(file=out, width=300))
    assert caught.value.exit_code == 3
    return str(caught.value), out.getvalue()


def steps(run):
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_folder_that_is_moved_is_followed_and_the_step_in_hand_is_saved_there(tmp_path, monkeypatch):
    line, out = ended(tmp_path, monkeypatch, moved)
    run, place = tmp_path / "r", tmp_path / "moved"
    assert line == (
        f"{run}: moved to {place} while the run went on; move it back, and go on with --resume latest"
    )
    assert not run.exists() and steps(place) == [1, 2, 3, 4]
    assert latest(place).name == "step_000004" and (place / "trajectories" / "step_000004.jsonl").exists()
    assert json.loads((place / "summary.json").read_text())["exit"] == 3 and "warning" not in out


def test_one_that_is_removed_is_made_anew_with_the_step_in_hand(tmp_path, monkeypatch):
    line, out = ended(tmp_path, monkeypatch, shutil.rmtree)
    run = tmp_path / "r"
    assert line == (
        f"{run}: removed while the run went on; made anew with what it had in hand: "
        "go on with --resume latest"
    )
    assert steps(run) == [4] and latest(run).name == "step_000004" and (run / "config.yaml").exists()
    assert "warning" not in out


def test_nothing_is_written_to_a_folder_that_has_the_name_of_the_one_that_was_removed(tmp_path, monkeypatch):
    line, _ = ended(tmp_path, monkeypatch, removed_and_replaced)
    run = tmp_path / "r"
    assert line.startswith(f"{run}: removed while the run went on, and another folder has its name")
    assert [file.name for file in run.iterdir()] == ["metrics.jsonl"] and steps(run) == [99]


def test_nor_to_one_that_has_the_name_of_the_one_that_was_moved(tmp_path, monkeypatch):
    line, _ = ended(tmp_path, monkeypatch, moved_and_replaced)
    assert f"moved to {tmp_path / 'moved'}" in line and steps(tmp_path / "moved") == [1, 2, 3, 4]
    assert [file.name for file in (tmp_path / "r").iterdir()] == ["metrics.jsonl"] and steps(
        tmp_path / "r"
    ) == [99]


def test_a_lock_that_somebody_tidied_away_is_taken_again(tmp_path):
    made = system(tmp_path)
    (made.folder.path / ".lock").unlink()
    made.folder.metrics({"step": 1})
    other = RunFolder(made.config)
    with pytest.raises(UserError, match="in use by another running process"):
        other.open(resume=True)
    assert not made.folder.hold()
    made.folder.close()


@pytest.mark.parametrize("happens", [moved, moved_and_replaced, removed_and_replaced, shutil.rmtree])
def test_a_run_that_gets_no_further_is_ended_also_where_its_folder_is_gone(tmp_path, happens):
    made = system(tmp_path)

    async def stuck(driver):
        happens(tmp_path / "r")
        await asyncio.get_running_loop().create_future()

    driver = Halting(made, 3, stuck)
    with pytest.raises(UnspiralError, match="no progress for"):
        asyncio.run(watching(made, driver, 0.5))
    if happens in (moved_and_replaced, removed_and_replaced):
        assert [file.name for file in (tmp_path / "r").iterdir()] == ["metrics.jsonl"], "it is another run's"
    else:
        assert (made.folder.path / "stall.txt").is_file()
    made.folder.close()
