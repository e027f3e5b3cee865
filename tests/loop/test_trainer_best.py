"""Learning-rate schedules, the best checkpoint, patience; and that all three survive a kill."""

import asyncio
import json
import math
import re
import signal

import pytest
from test_trainer_best_killed import SCORES, SETTINGS
from test_trainer_monitor_actions import Pool, Scripted, system

from services.common.errors import UserError
from services.contracts import Question
from trainer.config.learner import LearnerSettings
from trainer.config.schema import TrainerSettings, parse_config
from trainer.learner.checkpoint import (
    CheckpointNotWritten,
    best_of,
    find,
    latest,
    mark_best,
    prune,
    written_aside,
)
from trainer.learner.steps.schedule import lr_factor
from trainer.loop.run.best import Best
from trainer.loop.run.sources import compared
from trainer.session.preflight.held_out import check_held_out
from trainer.session.run import checkpoint_of


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
        ({"trainer": {"keep_best": True}}, "trainer.keep_best needs held-out scores during the run: set"),
        ({"trainer": {"patience": 3, "eval_every": 5}}, "trainer.patience needs held-out scores"),
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
    with pytest.raises(UserError, match=r"best: runs/r keeps none: trainer\.keep_best=true makes it"):
        find("best")
    made_by = "no such .*folder; the run kept none: trainer.keep_best=true makes it, by held-out scores"
    for name in (find, lambda given: checkpoint_of(given, run)):
        with pytest.raises(UserError, match=f"runs/r/checkpoints/best: {made_by}"):
            name("runs/r/checkpoints/best")
    (run / "summary.json").write_text(json.dumps({"best": {"step": 0, "score": 0.75, "by": "em"}}))
    before = "its best held-out score, 0.750, is that before training, of which there is no checkpoint"
    for name in ("best", "runs/r/checkpoints/best"):
        with pytest.raises(UserError, match=before):
            find(name)
    with pytest.raises(UserError) as absent:  # of a run that is not there, nothing is known
        find("runs/s/checkpoints/best")
    assert "keep_best" not in str(absent.value)
    best = Best(step=2, score=0.5)
    best.keep(run, TrainerSettings(keep_best=True, keep_checkpoints=1))
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["best", "step_000002", "step_000006"]
    assert checkpoint_of("best", run) == run / "checkpoints" / "step_000002"
    for given in ("best", "runs/r/checkpoints/best"):
        assert find(given).resolve() == run / "checkpoints" / "step_000002"
    assert find("latest").name == find("runs/r").name == "step_000006"
    Best(step=6, score=0.6).keep(run, TrainerSettings(keep_best=True, keep_checkpoints=1))
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["best", "step_000006"]
    prune(run, 1)
    mark_best(run, None)
    assert best_of(run) is None


BY_SOURCE = {"em": 0.3, "f1": 0.4, "em_by_source": {"nq": 0.6, "hotpot_qa_dev": 0.1}}


@pytest.mark.parametrize(
    ("score", "by", "value"),
    [
        (BY_SOURCE, "em", 0.3),
        (BY_SOURCE, "em_macro", 0.35),
        (BY_SOURCE, "em/nq", 0.6),
        (BY_SOURCE, "em/hotpot qa/dev", 0.1),
        (BY_SOURCE, "em/popqa", None),
        (BY_SOURCE, "right", None),
        ({"em": 0.3, "em_by_source": {}}, "em_macro", 0.3),
        ({"em": 0.3, "em_by_source": {}}, "em/nq", 0.3),
        ({"em": 0.3}, "em_macro", None),
    ],
)
def test_checkpoints_are_compared_by_a_source_or_by_the_mean_of_all(score, by, value):
    """One source has no score of its own beside the whole; earlier versions kept none by source."""
    assert compared(score, by) == pytest.approx(value)


def test_the_best_by_a_source_is_chosen_anew_from_the_scores_of_a_run():
    scores = {
        f"step{step}/greedy": {"em": em, "em_by_source": {"nq": nq, "popqa": 2 * em - nq}}
        for step, em, nq in ((2, 0.4, 0.1), (4, 0.3, 0.5), (6, 0.2, 0.4))
    }
    assert [Best.of_scores(scores, 6, by).step for by in ("em", "em/nq", "em/popqa", "em_macro")] == [
        2,
        4,
        2,
        2,
    ]


def test_a_source_without_questions_is_refused_before_anything_starts():
    def asked(name, text, answer):
        return Question(text, text, (answer,), name)

    held_out = [asked("nq", "who?", "a"), asked("hotpot qa", "Where is it?", "b")]
    train = [asked("nq", "where  is it", "B"), asked("nq", "who?", "another")]
    said = []

    def check(by):
        check_held_out(parse_config(raw(trainer={"best_by": by})), train, held_out, said.append)

    for by in ("em", "em_macro", "em/nq", "em/hotpot qa"):
        check(by)
    assert (
        said[0].startswith("warning: 1 of 2 questions of data.eval stand in data.train too")
        and len(said) == 4
    )
    with pytest.raises(
        UserError, match=r"trainer\.best_by=em/popqa: data\.eval has no score of a source popqa; acc"
    ):
        check("em/popqa")
    with pytest.raises(
        UserError, match=r"trainer\.best_by.*emm: accepted are em, f1, right, em_macro, em/SOURCE"
    ):
        check("emm")


EXACT = {}
"""Exact match by step, in a scripted run; 0 at all others."""


class Scored(Scripted):
    """The real loop over a system that does nothing, with held-out scores that are given; it dies in the
    step after `dies`."""

    def __init__(self, made, dies=None):
        super().__init__(made, {})
        self.dies = dies
        self.evaluations.run = self.evaluate

    async def one_step(self, step):
        if self.dies is not None and step > self.dies:
            self.checkpointable = False  # a kill saves nothing
            raise RuntimeError("killed")
        return await super().one_step(step)

    async def evaluate(self, tag):
        scores = {"em": EXACT.get(self.step, 0.0), "right": SCORES[self.step]}
        self.keep_scores(tag, "greedy", scores)
        self.best.take(self.step, scores[self.config.trainer.best_by])


@pytest.mark.parametrize("dies", [None, 1, 3, 4, 5, 6])
def test_the_loop_keeps_the_best_and_ends_in_patience_wherever_it_was_killed(tmp_path, dies):
    made = system(
        tmp_path,
        data={"train": "t", "eval": "e"},
        trainer=SETTINGS["trainer"] | {"checkpoint_every": 2},
        monitor={"action": "none"},
    )
    driver = Scored(made, dies)
    if dies is not None:
        with pytest.raises(RuntimeError, match="killed"):
            asyncio.run(driver.run())
        made.pool = Pool()
        driver = Scored(made)
        driver.load_state_dict(made.learner.load(latest(made.folder.path)))
    summary = asyncio.run(driver.run())
    assert summary["steps"] == 7 and summary["best"] == {"step": 4, "score": 0.5, "by": "right"}
    assert summary["stopped"].endswith("the best is 0.500, at step 4")
    names = sorted(p.name for p in (made.folder.path / "checkpoints").iterdir())
    assert names == ["best", "step_000004", "step_000007"]
    made.pool = Pool()
    again = Scored(made)
    again.load_state_dict(made.learner.load(latest(made.folder.path)))
    assert asyncio.run(again.run())["stopped"] == summary["stopped"], "a run that has ended ends again"
    assert again.trace == []


def test_a_run_that_ended_with_its_best_step_keeps_it_when_it_goes_on(tmp_path, monkeypatch):
    """The score of the last step comes after that step's checkpoint."""
    for step, score in {5: 0.9, 8: 0.1, 9: 0.1}.items():
        monkeypatch.setitem(SCORES, step, score)

    made = system(
        tmp_path,
        data={"train": "t", "eval": "e"},
        trainer=SETTINGS["trainer"] | {"steps": 5, "eval_every": 2, "patience": 0},
        monitor={"action": "none"},
    )
    assert asyncio.run(Scored(made).run())["best"]["step"] == 5
    made.config.trainer = made.config.trainer.model_copy(update={"steps": 9})
    made.pool = Pool()
    driver = Scored(made)
    driver.load_state_dict(made.learner.load(latest(made.folder.path)))
    assert asyncio.run(driver.run())["best"] == {"step": 5, "score": 0.9, "by": "right"}
    assert best_of(made.folder.path).name == "step_000005"


@pytest.mark.parametrize("middle", [["em"], []], ids=["third part", "second part"])
def test_another_best_by_knows_the_ends_of_all_earlier_parts(tmp_path, monkeypatch, middle):
    """Steps 5 and 7 end a part of the run each, and no evaluation is due after them. By exact match neither
    is the best; by `right`, step 5 is."""
    for step, score in {5: 0.9, 7: 0.8, 8: 0.1, 9: 0.1}.items():
        monkeypatch.setitem(SCORES, step, score)
    monkeypatch.setitem(EXACT, 2, 0.7)
    made = system(
        tmp_path,
        data={"train": "t", "eval": "e"},
        trainer=SETTINGS["trainer"] | {"eval_every": 2, "patience": 0, "keep_checkpoints": 9},
        monitor={"action": "none"},
    )

    def part(steps, by):
        made.config.trainer = made.config.trainer.model_copy(update={"steps": steps, "best_by": by})
        made.pool = Pool()
        driver = Scored(made)
        if found := latest(made.folder.path):
            driver.load_state_dict(made.learner.load(found))
        return asyncio.run(driver.run())

    assert part(5, "em")["best"] == {"step": 2, "score": 0.7, "by": "em"}
    for by in middle:
        assert part(7, by)["best"] == {"step": 2, "score": 0.7, "by": "em"}
    assert part(9, "right")["best"] == {"step": 5, "score": 0.9, "by": "right"}
    assert best_of(made.folder.path).name == "step_000005"


def test_a_state_that_does_not_say_by_which_score_was_chosen_is_asked_for_its_settings(tmp_path):
    """As those of earlier versions, and of runs that had not been resumed."""
    made = system(tmp_path, trainer={"steps": 9, "eval_every": 2, "best_by": "right"})
    driver = Scripted(made, {})
    driver.step = 4
    driver.scores = scores_of(before=(0.3, 0.1), step2=(0.2, 0.6), step4=(0.4, 0.5))
    driver.best = Best.of_scores(driver.scores, 4, "em")
    state = json.loads(json.dumps(driver.state_dict()))
    state["best"]["by"] = None
    state["identity"] = {"settings": {"trainer": {"best_by": "em"}}}
    driver.take_up(state)
    assert (driver.best.step, driver.best.score, driver.best.by) == (2, 0.6, "right")


def test_a_step_whose_answers_have_no_score_is_asked_once(tmp_path, monkeypatch):
    """As where the reward's judge is down: a run that goes on from the step must not ask again."""
    monkeypatch.setitem(SCORES, 4, None)
    made = system(
        tmp_path,
        data={"train": "t", "eval": "e"},
        trainer=SETTINGS["trainer"] | {"eval_every": 4},
        monitor={"action": "none"},
    )
    with pytest.raises(RuntimeError, match="killed"):
        asyncio.run(Scored(made, dies=4).run())
    driver = Scored(made)
    driver.load_state_dict(made.learner.load(latest(made.folder.path)))
    assert (driver.step, driver.best.at, driver.best.score) == (4, 0, SCORES[0])
    asked = []
    driver.evaluations.run = lambda tag: asked.append(tag) or asyncio.sleep(0)
    asyncio.run(driver.evaluations.left_out())
    assert asked == []
    driver.best.asked = 0  # the evaluation was due, and a signal came first
    asyncio.run(driver.evaluations.left_out())
    assert asked == ["step4"]


def test_the_summary_calls_no_earlier_end_the_end(tmp_path):
    made = system(tmp_path, trainer={"steps": 9})
    driver = Scripted(made, {})
    driver.step = 5
    driver.keep_scores("after", "greedy", {"em": 0.5})
    assert driver.summary()["em_after"] == 0.5
    driver.step = 6  # it went on, and was then asked to stop
    assert "em_after" not in driver.summary()
    driver.keep_scores("after", "greedy", {"em": 0.6})
    assert driver.summary()["em_after"] == 0.6
    assert driver.scores["after5/greedy"] == {"em": 0.5, "step": 5}


@pytest.mark.parametrize("stopped", [2, 4, 5])
def test_a_signal_before_an_evaluation_leaves_the_best_as_it_would_have_been(tmp_path, stopped):
    class Stopped(Scored):
        async def one_step(self, step):
            if step == stopped:
                self.stop.number = signal.SIGTERM  # it comes within the step, which ends first
            return await super().one_step(step)

    made = system(
        tmp_path,
        data={"train": "t", "eval": "e"},
        trainer=SETTINGS["trainer"],
        monitor={"action": "none"},
    )
    asyncio.run(Stopped(made).run())
    made.pool = Pool()
    driver = Scored(made)
    driver.load_state_dict(made.learner.load(latest(made.folder.path)))
    assert driver.step == stopped
    summary = asyncio.run(driver.run())
    assert summary["steps"] == 7 and summary["best"] == {"step": 4, "score": 0.5, "by": "right"}


def scores_of(**by_tag):
    return {f"{tag}/greedy": {"em": em, "right": right} for tag, (em, right) in by_tag.items()}


def test_the_best_is_recalled_from_the_scores_where_a_state_lacks_it_or_chose_by_another(tmp_path):
    made = system(tmp_path, trainer={"steps": 9, "eval_every": 2, "best_by": "right"})
    driver = Scripted(made, {})
    driver.load_state_dict(driver.first_state)  # as after a learner that was lost before its first checkpoint
    driver.scores = scores_of(before=(0.3, 0.1))
    driver.recall_best()
    assert (driver.best.step, driver.best.score, driver.best.by) == (0, 0.1, "right")

    driver.step = 4
    driver.scores = scores_of(before=(0.3, 0.1), step2=(0.2, 0.6), step4=(0.4, 0.5), step6=(1.0, 1.0))
    driver.best = Best.of_scores(driver.scores, 4, "em")
    assert (driver.best.step, driver.best.score, driver.best.since) == (4, 0.4, 0)
    state = json.loads(json.dumps(driver.state_dict()))
    driver.take_up(state)
    assert (driver.best.step, driver.best.score, driver.best.since, driver.best.by) == (2, 0.6, 1, "right")


def test_the_best_that_a_kill_left_between_two_renames_is_found_and_kept(tmp_path):
    run = tmp_path / "r"
    checkpoints(run, 10)
    mark_best(run, run / "checkpoints/step_000010")
    (run / "checkpoints/step_000010").rename(run / "checkpoints/step_000010.old")
    assert best_of(run) == run / "checkpoints/step_000010.old"
    checkpoints(run, 20)
    best = Best(step=10, score=0.9, at=20, by="em")
    best.keep(run, TrainerSettings(keep_best=True, keep_checkpoints=1))
    assert best_of(run) == run / "checkpoints/step_000010"
    assert latest(run) == run / "checkpoints/step_000020"


def test_scores_after_the_run_that_no_disk_takes_are_told_and_end_nothing(tmp_path, monkeypatch):
    def full(path, state):
        raise CheckpointNotWritten(f"{path} cannot be written: no space")

    monkeypatch.setattr("trainer.loop.keeping.checkpoints.replace_state", full)
    made = system(
        tmp_path,
        data={"train": "t", "eval": "e"},
        trainer=SETTINGS["trainer"] | {"steps": 4, "eval_every": 2, "patience": 0},
        monitor={"action": "none"},
    )
    driver = Scored(made)
    said = []
    monkeypatch.setattr(driver.progress, "say", said.append)
    assert asyncio.run(driver.run())["steps"] == 4
    assert any("the scores after the run are in no checkpoint" in line for line in said)
    assert latest(made.folder.path).name == "step_000004"
