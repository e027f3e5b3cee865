"""A demo that was stopped says how it goes on, by a command that does so; without a checkpoint it begins
anew."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.common.errors import UserError
from services.common.processes import signals
from trainer.commands.cli import main
from trainer.lab import show
from trainer.learner.checkpoint import step_folder


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """Demos whose training is stopped at once; `given` holds what it was given, `kept` its checkpoint."""
    monkeypatch.chdir(tmp_path)
    made = SimpleNamespace(given=[], kept=None)

    def stopped(config, *, resume, console):
        made.given.append((config.run_dir, config.trainer.steps, resume))
        config.run_dir.mkdir(parents=True, exist_ok=True)
        raise signals.Stopped(signal.SIGINT)

    def raw(files, *, folder, name, seed, steps):
        return {
            "run": {"dir": str(folder), "name": name},
            "model": {"path": "m"},
            "data": {"train": "t"},
            "retriever": {"corpus": "c"},
            "trainer": {"steps": steps or 12},
        }

    monkeypatch.setattr(show, "train", stopped)
    monkeypatch.setattr(show, "prepared", lambda *a: SimpleNamespace(model="m"))
    monkeypatch.setattr(show, "demo_config", raw)
    monkeypatch.setattr(show, "latest", lambda run, checksums: made.kept)
    return made


def test_without_a_checkpoint_it_begins_anew(demo, tmp_path):
    anew = "stopped by SIGINT; no checkpoint was written, so that a demo begins anew: unspiral demo"
    with pytest.raises(signals.Stopped) as e:
        show.run_demo(Path("runs"), 0)
    assert (e.value.exit_code, str(e.value)) == (130, anew)
    (tmp_path / "runs" / "demo-0").mkdir(exist_ok=True)
    (tmp_path / "runs" / "demo-0" / "report.html").touch()
    with pytest.raises(signals.Stopped) as e:
        show.run_demo(Path("runs"), 0)
    assert str(e.value) == anew  # the report was the earlier demo's, which has been moved aside


@pytest.mark.parametrize(
    ("folder", "seed", "steps", "command"),
    [
        ("runs", 0, None, "unspiral demo --resume latest"),
        ("my runs", 3, 30, "unspiral demo --resume latest --dir 'my runs' --seed 3 --steps 30"),
    ],
)
def test_the_command_that_it_prints_goes_on_with_it(demo, folder, seed, steps, command):
    run = Path(folder) / f"demo-{seed}"
    demo.kept = step_folder(run, 4)
    with pytest.raises(signals.Stopped) as e:
        show.run_demo(Path(folder), seed, steps=steps)
    assert str(e.value) == f"stopped by SIGINT; go on after step 4: {command}"
    (run / "report.html").touch()
    with pytest.raises(SystemExit):
        main(shlex.split(command)[1:])
    assert demo.given == [(run, steps or 12, None), (run, steps or 12, "latest")]
    assert (run / "report.html").exists()  # its folder was not moved aside


def test_the_arms_of_a_collapse_go_on_too(demo, monkeypatch, tmp_path):
    asked = []

    def arms(console, folder, configs, *, resume):
        asked.append((sorted(configs), resume))
        raise signals.Stopped(signal.SIGTERM)

    monkeypatch.setattr(show, "run_arms", arms)
    monkeypatch.setattr(
        show, "collapse_config", lambda files, llds_lambda, **kw: show.demo_config(files, **kw)
    )
    command = "unspiral demo --collapse --resume latest --seed 2 --seeds 2"
    with pytest.raises(signals.Stopped) as e:
        show.run_collapse(Path("runs"), [2, 3])
    assert str(e.value) == f"stopped by SIGTERM; go on with {command}"
    with pytest.raises(SystemExit):
        main(shlex.split(command)[1:])
    assert asked == [(["grpo", "llds"], False), (["grpo", "llds"], True)]


def test_the_arms_are_told_to_go_on(monkeypatch, tmp_path):
    commands = []

    def start(command, **options):
        commands.append(command)
        raise UserError("far enough")

    monkeypatch.setattr(show.subprocess, "Popen", start)
    monkeypatch.setattr(show, "dump_config", lambda config: "")
    arm = SimpleNamespace(run=SimpleNamespace(name="a"), trainer=SimpleNamespace(steps=1))
    for resume, words in ((False, []), (True, ["--resume", "latest"])):
        with pytest.raises(UserError):
            show.run_arms(show.Console(), tmp_path, {"grpo": arm}, resume=resume)
        assert commands[-1][-2:] == (words or ["--config", str(tmp_path / "a.yaml")])
