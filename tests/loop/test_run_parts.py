"""A run in several parts: its seconds are those of all of them, and one that is done does not start."""

from __future__ import annotations

import json

import pytest
from scripted_runs import quick, started, summary, trained  # noqa: F401
from test_trainer_cut_short import Sampling
from test_trainer_monitor_actions import Scripted, system

from services.common.errors import UserError
from services.common.processes import signals
from trainer.commands.work.in_words import run_in_words
from trainer.learner.checkpoint import latest, step_folder
from trainer.session import run as runs


class Slow(Scripted):
    """Each step says that it took 50 s."""

    async def one_step(self, step):
        action = await super().one_step(step)
        self.system.folder.metrics({"step": step, "attempt": self.attempt, "time/step": 50.0})
        return action


def ready(tmp_path, monkeypatch, driver=Scripted, steps=12, **changes):
    """A scripted run whose steps, but not its end, need Ray; `begun` counts its starts."""
    made = system(tmp_path, **changes)
    made.config.trainer.steps = steps
    made.folder.close()
    started(made, monkeypatch, driver)
    start, begun = runs.start_system, []

    def counted(*given, **named):
        begun.append(1)
        return start(*given, **named)

    monkeypatch.setattr(runs, "start_system", counted)
    return made, begun


def test_the_seconds_of_a_resumed_run_are_those_of_all_its_parts(tmp_path, monkeypatch):
    made, _ = ready(tmp_path, monkeypatch, Sampling)
    with pytest.raises(signals.Stopped):
        trained(made, resume="latest")
    assert "last_part_seconds" not in summary(made)
    told = summary(made) | {"seconds": 100.0}
    (made.folder.path / "summary.json").write_text(json.dumps(told))
    started(made, monkeypatch)
    result, _ = trained(made, resume="latest")
    assert result["last_part_seconds"] < 60 and summary(made) == result
    assert result["seconds"] == pytest.approx(100 + result["last_part_seconds"], abs=0.11)
    made.config.trainer.steps = 14
    started(made, monkeypatch)
    third, _ = trained(made, resume="latest")
    assert third["seconds"] == pytest.approx(result["seconds"] + third["last_part_seconds"], abs=0.11)


def test_a_part_that_was_killed_counts_by_its_steps(tmp_path, monkeypatch):
    made, _ = ready(tmp_path, monkeypatch, Slow, steps=4)
    trained(made, resume="latest")
    (made.folder.path / "summary.json").unlink()  # as after a kill
    made.config.trainer.steps = 6
    started(made, monkeypatch, Slow)
    assert trained(made, resume="latest")[0]["seconds"] == pytest.approx(200, abs=30)
    (made.folder.path / "summary.json").unlink()
    made.config.trainer.steps = 8
    started(made, monkeypatch, Slow)
    assert trained(made, resume="latest")[0]["seconds"] == pytest.approx(300, abs=30)


def test_the_last_line_tells_both():
    told = {"steps": 2, "seconds": 250.4, "phase": "healthy"}
    assert run_in_words(told) == "2 steps in 4:10, phase healthy"
    told["last_part_seconds"] = 38.5
    assert run_in_words(told) == "2 steps in 4:10 (0:38 of it since the run was resumed), phase healthy"


def test_a_run_whose_steps_are_done_ends_before_anything_starts(tmp_path, monkeypatch):
    made, begun = ready(tmp_path, monkeypatch, steps=4)
    trained(made, resume="latest")
    before = summary(made)
    report = made.folder.path / "report.html"
    report.unlink()
    result, out = trained(made, resume="latest")
    kept = latest(made.folder.path)
    assert f"nothing left to do: 4 of 4 steps, checkpoint {kept}; raise trainer.steps to go on" in out
    assert result == before == summary(made) and report.exists() and len(begun) == 1
    made.config.trainer.steps = 2
    assert (
        "nothing left to do: step 4 is done, and trainer.steps=2, checkpoint"
        in trained(made, resume="latest")[1]
    )
    made.config.trainer.steps = 6
    trained(made, resume="latest")
    assert len(begun) == 2 and made.folder.last_step() == 6


@pytest.mark.parametrize("resume", ["latest", "path"])
def test_checkpoints_that_lie_elsewhere_are_the_runs_own(tmp_path, monkeypatch, resume):
    made, begun = ready(tmp_path, monkeypatch, steps=4)
    trained(made, resume="latest")
    place = made.folder.path / "checkpoints"
    place.rename(tmp_path / "archive")
    place.symlink_to(tmp_path / "archive")
    given = resume if resume == "latest" else str(place / "step_000004")
    assert "nothing left to do: 4 of 4 steps" in trained(made, resume=given)[1] and len(begun) == 1


def test_the_summary_of_a_run_that_was_killed_at_its_end_is_written(tmp_path, monkeypatch):
    made, begun = ready(tmp_path, monkeypatch, steps=4)
    first, _ = trained(made, resume="latest")
    (made.folder.path / "summary.json").unlink()
    result, _ = trained(made, resume="latest")
    assert len(begun) == 1 and result == summary(made)
    assert (result["steps"], result["exit"], result["phase"]) == (4, 0, first["phase"])


def test_a_last_evaluation_that_is_missing_is_asked(tmp_path, monkeypatch):
    made, begun = ready(tmp_path, monkeypatch, steps=4)
    trained(made, resume="latest")
    made.config.trainer.eval_at_ends = True
    made.config.data.eval = "held_out.jsonl"
    trained(made, resume="latest")
    assert len(begun) == 2


def test_a_run_whose_patience_is_at_its_end_is_done_too(tmp_path, monkeypatch):
    made, begun = ready(tmp_path, monkeypatch, steps=4)
    trained(made, resume="latest")
    made.config.trainer.steps, made.config.trainer.patience = 9, 2
    file = step_folder(made.folder.path, 4) / "state.json"
    state = json.loads(file.read_text())
    best = {"step": 2, "score": 0.5, "at": 4, "asked": 4, "since": 2, "by": "em"}
    text = json.dumps(state | {"best": best})
    monkeypatch.setattr("trainer.session.resuming.rules.fault", lambda *given, **named: None)
    monkeypatch.setattr(runs, "latest", lambda *given, **named: file.parent)
    file.write_text(text)
    _, out = trained(made, resume="latest")
    assert (
        "nothing left to do after step 4: no better held-out em in 2 evaluations (trainer.patience=2)" in out
    )
    assert "raise trainer.patience to go on" in out and len(begun) == 1


def test_another_runs_checkpoint_of_the_last_step_begins_no_run(tmp_path, monkeypatch):
    first, _ = ready(tmp_path, monkeypatch, steps=4)
    trained(first, resume="latest")
    base = latest(first.folder.path)
    made, begun = ready(tmp_path, monkeypatch, steps=4, run={"name": "other", "dir": str(tmp_path)})
    with pytest.raises(UserError, match=r"^--resume .*: nothing left to do: 4 of 4 steps"):
        trained(made, resume=str(base))
    assert begun == []
