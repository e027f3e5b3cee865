"""A run from its command to its exit status: what is resumed, asked for once, left behind, and said."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import shutil
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from rich.console import Console
from scripted_runs import started, summary, trained
from test_trainer_monitor_actions import Scripted, events, system

from services.common.errors import UserError
from trainer.learner.checkpoint import drop_after, latest, step_folder
from trainer.session import run as runs
from trainer.session.on_ray.watch import RayLost

COUNTED = """
asked = []

def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(name)
    asked.append(name)
    return lambda *given, **named: 1.0
"""


def test_a_run_asks_for_each_part_of_the_users_own_once(tmp_path, monkeypatch):
    (tmp_path / "counted_parts.py").write_text(COUNTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = system(
        tmp_path,
        reward={"kind": "counted_parts:reward"},
        algorithm={"loss": "counted_parts:loss"},
        rollout={"tools": {"calc": "counted_parts:tool"}},
    )
    trainer = made.config.trainer.model_copy(update={"metrics": ["counted_parts:metric"]})
    made.config = made.config.model_copy(update={"trainer": trainer})
    made.folder.close()
    started(made, monkeypatch)
    trained(made, resume="latest")
    assert sorted(sys.modules["counted_parts"].asked) == ["loss", "metric", "reward", "tool"]
    assert made.reward.kind == "counted_parts:reward" and list(made.metrics) == ["counted_parts:metric"]


def test_resume_without_a_checkpoint_says_so_and_is_the_next_attempt(tmp_path, monkeypatch):
    made = system(tmp_path)
    made.folder.metrics({"step": 1, "attempt": 0})
    made.folder.close()
    started(made, monkeypatch)
    _, out = trained(made, resume="latest")
    assert "no whole checkpoint to resume from: starting anew, as attempt 1" in out
    lines = [json.loads(line) for line in made.folder.metrics_path.read_text().splitlines()]
    assert [(m["step"], m["attempt"]) for m in lines] == [(s, 1) for s in range(1, 13)]
    assert "no earlier run is there" not in out
    drop_after(made.folder.path, 4)
    trained(made, resume="latest")
    assert [(e["step"], e["attempt"]) for e in events(made) if e["event"] == "resume"] == [(0, 1), (4, 2)]
    assert latest(made.folder.path) == step_folder(made.folder.path, 12)


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_leaves_no_thread_of_its_rewards(tmp_path, monkeypatch, fails):
    """A program may train more than once: each such thread would keep a run's reward, and a model in it."""
    threads = []

    class Rewarding(Scripted):
        async def one_step(self, step):
            def reward(trajectory):
                threads.append(threading.current_thread())

            self.sampler.calls.reward = reward
            await self.sampler.calls.of([SimpleNamespace(uid="u")])
            if fails:
                raise UserError("no more")
            return await super().one_step(step)

    made = system(tmp_path)
    made.folder.close()
    started(made, monkeypatch, Rewarding)
    with pytest.raises(UserError, match="no more") if fails else nullcontext():
        trained(made, resume="latest")
    threads[0].join(60)
    assert not threads[0].is_alive()


def test_resume_in_an_unused_folder_is_a_first_attempt(tmp_path, monkeypatch):
    made = system(tmp_path / "unused")
    made.folder.close()
    (made.folder.path / "config.yaml").unlink()
    started(made, monkeypatch)
    trained(made, resume="latest")
    assert [e for e in events(made) if e["event"] == "resume"] == []


def test_a_run_that_fails_before_its_first_step_leaves_a_summary(tmp_path, monkeypatch):
    made = system(tmp_path)
    made.folder.close()
    started(made, monkeypatch)

    def resolve(path):
        raise UserError("model.path m: no such folder")

    monkeypatch.setattr(runs.models, "resolve", resolve)
    with pytest.raises(UserError):
        trained(made)
    assert summary(made)["steps"] == 0 and summary(made)["exit"] == 2


def test_a_report_that_fails_is_a_warning(tmp_path, monkeypatch):
    made = system(tmp_path)
    made.folder.close()

    class Spoilt(Scripted):
        async def run(self):
            result = await super().run()
            (self.system.folder.path / "events.jsonl").write_text('{"torn\n{"event": "x"}\n')
            return result

    started(made, monkeypatch, Spoilt)
    result, out = trained(made)
    assert result["exit"] == 0 and result["steps"] == 12
    assert "warning: no report was written" in out and "events.jsonl, line 1: not JSON" in out


def test_a_full_disk_ends_the_run_with_the_name_of_the_file(tmp_path, monkeypatch):
    """Not with what else fails because of it: a torn last line, a summary that is not written."""
    made = system(tmp_path)
    made.folder.close()

    def full(summary):
        raise OSError(errno.ENOSPC, "No space left on device", "summary.json")

    class Filling(Scripted):
        async def one_step(self, step):
            if step == 4:
                with open(self.system.folder.metrics_path, "a") as f:
                    f.write('{"step": 4, "x": "cut sh')
                log = self.system.folder.path / "events.jsonl"
                monkeypatch.setattr(self.system.folder, "summary", full)
                log.unlink()
                log.symlink_to("/dev/full")
                try:
                    self.system.folder.event("alarm")
                finally:
                    log.unlink()
            return await super().one_step(step)

    started(made, monkeypatch, Filling)
    out = io.StringIO()
    with pytest.raises(OSError, match="No space left on device") as caught:
        runs.train(made.config, console=Console(file=out, width=200))
    assert caught.value.filename == str(
        made.folder.path / "events.jsonl"
    )  # which the command line prints, with exit 3
    assert "warning: no summary was written: " in out.getvalue()


def test_resume_of_a_run_that_never_was_says_that_it_begins_anew(tmp_path, monkeypatch):
    made = system(tmp_path)
    made.folder.close()
    shutil.rmtree(made.folder.path)
    started(made, monkeypatch)
    _, out = trained(made, resume="latest")
    assert "--resume: no earlier run is there, so this one begins anew" in out
    assert "runs with a name like it" not in out


def test_resume_of_a_misspelt_run_names_the_one_that_was_meant(tmp_path, monkeypatch):
    made = system(tmp_path, run={"name": "first", "dir": str(tmp_path)})
    made.folder.close()
    shutil.rmtree(made.folder.path)
    meant = made.folder.path.with_name(f"{made.folder.path.name}s")
    meant.mkdir()
    (meant / "metrics.jsonl").write_text('{"step": 39}\n{"step": 40}\n')
    (made.folder.path.parent / "other").mkdir()
    started(made, monkeypatch)
    _, out = trained(made, resume="latest")
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if "so this one begins anew" in line)
    assert lines[at - 1] == lines[at + 3] == "=" * 78
    assert lines[at + 1] == f"runs with a name like it: {meant} (step 40)"
    assert lines[at + 2].endswith(f"the same command with run.name={meant.name}")


def test_the_death_of_ray_is_told_at_once_while_the_loop_is_in_a_call_to_it(tmp_path, monkeypatch, capsys):
    left = []
    monkeypatch.setattr(runs, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(runs, "_leave_without_ray", lambda *given: left.append(capsys.readouterr().err))
    driver = SimpleNamespace(checkpointable=False, on_learner=SimpleNamespace(doing=None))
    loop = asyncio.new_event_loop()  # it never runs, as one that a call holds up
    lost = RayLost("Ray's raylet on this machine (pid 7) has died")
    runs._ray_has_died(lost, driver, SimpleNamespace(end_soon=None), loop)
    loop.close()
    (said,) = left
    assert said == f"unspiral: {lost}; the last whole step is saved where Ray lets the run live on\n"


def test_resume_of_a_path_that_is_not_there_is_refused_with_the_nearest_run(tmp_path, monkeypatch):
    made = system(tmp_path, run={"name": "first", "dir": str(tmp_path)})
    made.folder.close()
    started(made, monkeypatch)
    meant = made.folder.path
    (meant / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=f"no such checkpoint folder; did you mean {meant}\\?"):
        trained(made, resume=str(meant.with_name(f"{meant.name}s")))


def test_a_folder_in_use_is_left_as_it_is(tmp_path, monkeypatch):
    made = system(tmp_path)  # holds it
    started(made, monkeypatch)
    with pytest.raises(UserError, match="in use"):
        trained(made)
    assert not (made.folder.path / "summary.json").exists()
