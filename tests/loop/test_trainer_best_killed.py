"""The best checkpoint, patience and the schedule of a real run that is killed."""

import json
import zlib

import pytest
from end_to_end import command, finish, laboratory, metrics
from runs import at_step, kill, run_config, start

from trainer.config.learner import LearnerSettings
from trainer.learner.checkpoint import best_of
from trainer.learner.steps.schedule import lr_factor


def reward(trajectory):
    """1 or 0 by the trajectory's name alone, so that held-out scores are known beforehand."""
    return float((zlib.crc32(f"19 {trajectory.uid}".encode()) >> 8) % 3 == 0)


SCORES = dict(enumerate(n / 8 for n in (2, 3, 2, 2, 4, 4, 2, 2)))
"""Of `reward`, by step: the best is at step 4, and three evaluations after it are no better."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("best")
    return laboratory(folder), folder


SETTINGS = {
    "reward": {"kind": "test_trainer_best_killed:reward"},
    "learner": {"schedule": "cosine", "warmup_share": 0.2, "schedule_floor": 0.1},
    "trainer": {
        "steps": 9,
        "eval_every": 1,
        "checkpoint_every": 1,
        "keep_checkpoints": 1,
        "keep_best": True,
        "best_by": "right",
        "patience": 3,
        "eval_at_ends": True,
    },
}


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_schedule_best_and_patience_survive_a_kill(lab):
    files, folder = lab
    config = run_config(files, folder, "killed", **SETTINGS)
    run = folder / "killed"
    process = start(config)
    at_step(run, 3, process)
    kill(process)
    code, out = finish(command("train", "--config", config, "--resume", "latest"), 300)
    assert code == 0, out
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["exit"], summary["steps"]) == (0, 7)
    assert summary["best"] == {"step": 4, "score": 0.5, "by": "right"}
    assert summary["stopped"] == (
        "no better held-out right in 3 evaluations (trainer.patience=3): the best is 0.500, at step 4"
    )
    assert summary["stopped"] in " ".join(out.split())
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [e["attempt"] for e in events if e["event"] == "resume"] == [1]
    kept = [e for e in events if e["event"] == "evaluation" and e["tag"] != "after"]
    assert {e["step"]: e["overall"]["right"] for e in kept} == SCORES
    steps = metrics(run)
    assert [s["step"] for s in steps] == list(range(1, 8))
    learner = LearnerSettings(**SETTINGS["learner"])
    for s in steps:
        factor = lr_factor(learner, batch=s["step"] - 1, optimiser_step=0, batches=9)
        assert s["lr"] == pytest.approx(1e-3 * factor)
    names = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert names == ["best", "step_000004", "step_000007"]
    assert best_of(run).name == "step_000004"
