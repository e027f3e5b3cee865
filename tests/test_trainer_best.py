"""Learning-rate schedules, the best checkpoint, patience; and that all three survive a kill."""

import json
import math
import re

import pytest
from end_to_end import command, finish, laboratory, metrics
from runs import at_step, kill, run_config, start, unspiral

from services.common.errors import UserError
from trainer.config.learner import LearnerSettings
from trainer.config.schema import TrainerSettings, parse_config
from trainer.learner.checkpoint import best_of, find, mark_best, prune, written_aside
from trainer.learner.schedule import lr_factor
from trainer.loop.best import Best


def factors(batches, per_batch=2, **settings):
    learner = LearnerSettings(**settings)
    return [
        lr_factor(learner, batch=b, optimiser_step=b * per_batch, batches=batches) for b in range(batches)
    ]


def test_schedules_begin_at_the_rate_and_end_at_the_floor():
    assert factors(4) == [1.0] * 4
    assert factors(5, schedule="linear") == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert factors(5, schedule="linear", schedule_floor=0.2) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    half = (1 + math.cos(math.pi / 4)) / 2
    assert factors(5, schedule="cosine") == pytest.approx([1, half, 0.5, 1 - half, 0])
    assert factors(7, schedule="linear", warmup_batches=2) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0])
    assert factors(10, warmup_share=0.25)[:4] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert factors(3, warmup_steps=4) == pytest.approx([0.25, 0.75, 1.0])
    assert factors(1, schedule="cosine") == [1.0]
    long = LearnerSettings(schedule="cosine", schedule_floor=0.1)
    assert lr_factor(long, batch=99, optimiser_step=0, batches=10) == pytest.approx(0.1)


def raw(**sections):
    base = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "retriever": {"corpus": "c"}}
    return base | sections


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"learner": {"warmup_share": 0.1, "warmup_batches": 3}},
            "learner.warmup_batches and learner.warmup_share are two units of one warm-up; set one",
        ),
        ({"trainer": {"keep_best": True}}, "trainer.keep_best need held-out scores during the run: set"),
        ({"trainer": {"patience": 3, "eval_every": 5}}, "trainer.patience need held-out scores"),
    ],
)
def test_settings_that_cannot_act_are_refused(sections, says):
    with pytest.raises(UserError, match=re.escape(says)):
        parse_config(raw(**sections))


def test_the_best_is_the_first_of_equals_and_patience_counts_what_came_after():
    best = Best()
    settings = TrainerSettings(patience=2)
    assert [best.take(step, score) for step, score in ((0, 0.1), (2, 0.4), (4, 0.4))] == [True, True, False]
    assert best.why_to_end(settings) is None
    again = Best(**json.loads(json.dumps(best.state_dict())))
    assert not again.take(4, 0.9), "the evaluation at the end of a run is of the same weights"
    again.take(6, 0.3)
    assert again.why_to_end(settings) == (
        "no better held-out em in 2 evaluations (trainer.patience=2): the best is 0.400, at step 2"
    )
    assert again.why_to_end(TrainerSettings()) is None
    assert not Best().take(3, None)


def checkpoints(run, *steps):
    for step in steps:
        with written_aside(run / "checkpoints" / f"step_{step:06d}") as aside:
            for needed in ("state.json", "learner.json", "model/config.json", "weights/a", "rng/a"):
                (aside / needed).parent.mkdir(exist_ok=True)
                (aside / needed).write_text("{}")


def test_the_best_checkpoint_outlives_newer_ones_and_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "r"
    checkpoints(run, 2, 4, 6)
    (run / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"checkpoint best: runs/r keeps none \(see trainer.keep_best\)"):
        find("best")
    best = Best(step=2, score=0.5)
    best.keep(run, TrainerSettings(keep_best=True, keep_checkpoints=1))
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["best", "step_000002", "step_000006"]
    for given in ("best", "runs/r/checkpoints/best"):
        assert find(given).resolve() == run / "checkpoints" / "step_000002"
    assert find("latest").name == find("runs/r").name == "step_000006"
    Best(step=6, score=0.6).keep(run, TrainerSettings(keep_best=True, keep_checkpoints=1))
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["best", "step_000006"]
    prune(run, 1)
    mark_best(run, None)
    assert best_of(run) is None


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("best")
    return laboratory(folder), folder


SETTINGS = {
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
    steps = metrics(run)
    assert [s["step"] for s in steps] == list(range(1, summary["steps"] + 1))
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    scores = {e["step"]: e["overall"]["right"] for e in events if e["event"] == "evaluation"}
    assert len(set(scores.values())) > 1
    expected = Best()
    last = 0
    while last < 9 and not expected.why_to_end(TrainerSettings(patience=3)):
        last += bool(expected.at is not None)
        expected.take(last, scores[last])
    assert summary["steps"] == last
    assert summary["best"] == {"step": expected.step, "score": expected.score, "by": "right"}
    assert summary.get("stopped") == expected.why_to_end(TrainerSettings(patience=3, best_by="right"))
    assert summary["exit"] == 0
    learner = LearnerSettings(**SETTINGS["learner"])
    for s in steps:
        factor = lr_factor(learner, batch=s["step"] - 1, optimiser_step=0, batches=9)
        assert s["lr"] == pytest.approx(1e-3 * factor)
    kept = sorted(p.name for p in (run / "checkpoints").iterdir())
    wanted = {f"step_{last:06d}"} | ({f"step_{expected.step:06d}", "best"} if expected.step else set())
    assert set(kept) == wanted
    if "stopped" in summary:
        assert summary["stopped"] in " ".join(out.split())
    code, out = unspiral("config", "show", "--config", run / "config.yaml")
    assert code == 0 and "patience: 3" in out
