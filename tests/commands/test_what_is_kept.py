"""The last line of a run that was stopped."""

import shutil
from pathlib import Path

from places import DATA

from services.common.processes import signals
from trainer.commands.work.runs import next_commands, what_is_kept
from trainer.learner.checkpoint import written_aside


def test_a_stopped_run_names_its_checkpoint_and_its_report(tmp_path):
    assert what_is_kept(tmp_path) == ""
    for step in ("step_000002", "step_000004"):
        with written_aside(tmp_path / "checkpoints" / step) as aside:
            for needed in ("state.json", "learner.json", "model/config.json", "weights/a", "rng/a"):
                (aside / needed).parent.mkdir(parents=True, exist_ok=True)
                (aside / needed).write_text("{}")
    newest = tmp_path / "checkpoints" / "step_000004"
    assert what_is_kept(tmp_path) == f"checkpoint: {newest}"
    shutil.copy(DATA / "lab" / "grpo_1.jsonl", tmp_path / "report.html")
    said = what_is_kept(tmp_path)
    assert said == f"checkpoint: {newest}; report: {tmp_path / 'report.html'}"
    stopped = signals.Stopped(2, "step 5 is lost").with_advice(said)
    assert str(stopped) == f"stopped by SIGINT; step 5 is lost; {said}"
    assert (stopped.number, stopped.exit_code) == (2, 130)
    assert str(signals.Stopped(15).with_advice("")) == "stopped by SIGTERM"


def test_a_run_that_ended_names_what_to_type_next():
    assert next_commands(Path("runs/my run")) == [
        "unspiral eval --config 'runs/my run/config.yaml' --checkpoint 'runs/my run'",
        "unspiral ask --checkpoint 'runs/my run' 'QUESTION'",
        "unspiral export 'runs/my run' FOLDER",
    ]
