"""A step size that follows another run's, and demonstrations: their files, and what the driver makes of
them."""

import asyncio
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from test_trainer_idle_steps import QUESTIONS, Kept, Sampling, Scoring
from test_trainer_monitor_actions import system

from services.common.errors import UserError
from trainer.config.schema import parse_config
from trainer.data.demonstrations import demonstration_batch, read_demonstrations
from trainer.lab import demo as _lab  # noqa: F401  # registers the names of its files
from trainer.lab.tokenizer import build_tokenizer
from trainer.learner.group import Scores
from trainer.loop.driver import Driver
from trainer.loop.update.matched_step import LARGEST, MatchedStep, read_series
from trainer.loop.update.supervision import Supervision
from trainer.session.preflight.named_files import check_learner_files
from trainer.session.stopping import StopSignals


def config(**sections):
    base = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "retriever": {"corpus": "c.jsonl"}}
    return parse_config(base | sections)


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def followed(series, curvature, steps=40):
    """The divergences of a run whose update moves `curvature(step) * scale^2`."""
    matched, done = MatchedStep(series), {}
    for step in range(1, steps + 1):
        scale = matched.scale(step)
        done[step] = curvature(step) * scale**2
        matched.observe(step, scale, done[step])
    return matched, done


def test_the_step_size_follows_the_recorded_divergence():
    series = {step: 1e-3 * (1 + 0.5 * math.sin(step / 4)) for step in range(1, 41)}
    _, done = followed(series, lambda step: 9e-3)
    assert done[1] == 9e-3  # nothing is known before the first step
    assert [done[s] for s in range(4, 41)] == pytest.approx([series[s] for s in range(4, 41)])
    _, slow = followed(series, lambda step: 9e-3 * 1.05**step)
    assert all(0.9 < slow[s] / series[s] < 1.3 for s in range(6, 41))


def test_a_gap_or_an_idle_step_keeps_the_size_and_a_jump_is_bounded():
    matched = MatchedStep({1: 1.0, 2: 1e9, 4: 1.0})
    assert matched.scale(1) == 1.0
    matched.observe(1, 1.0, 1.0)
    assert matched.scale(2) == 2.0 and matched.scale(3) == 1.0
    matched.observe(3, 1.0, None)
    matched.observe(4, 1.0, float("nan"))
    assert set(matched.history) == {1}
    far, _ = followed({step: 1e30 for step in range(1, 31)}, lambda step: 1.0, steps=30)
    assert far.scale(31) <= LARGEST


def test_a_resumed_run_goes_on_with_the_same_sizes(tmp_path):
    series = {step: 1e-3 for step in range(1, 21)}
    matched = MatchedStep(series)
    rows = []
    for step in range(1, 11):
        scale = matched.scale(step)
        rows.append({"step": step, "learner/match_scale": scale, "kl/old": 5e-3 * scale**2 * step})
        matched.observe(step, scale, rows[-1]["kl/old"])
    again = MatchedStep(series)
    again.restore(written(tmp_path / "metrics.jsonl", rows), 7)
    assert again.history == {s: kept for s, kept in matched.history.items() if s <= 7}
    assert again.scale(8) == matched.scale(8)


@pytest.mark.parametrize(
    ("rows", "said"), [(None, "no such run"), ([{"step": 1, "kl/old": None}], r"records no kl/old above 0")]
)
def test_a_run_without_a_series_is_refused_before_anything_starts(tmp_path, rows, said):
    if rows is not None:
        written(tmp_path / "metrics.jsonl", rows)
    else:
        tmp_path = tmp_path / "gone"
    with pytest.raises(UserError, match=rf"^learner\.match_kl: {tmp_path}: {said}"):
        check_learner_files(config(learner={"match_kl": str(tmp_path)}))


def test_a_series_is_read_from_a_folder_or_a_file(tmp_path):
    file = written(
        tmp_path / "metrics.jsonl", [{"step": 1, "kl/old": 0.5}, {"step": 2}, {"step": 3, "kl/old": 0}]
    )
    assert read_series(str(tmp_path)) == read_series(str(file)) == {1: 0.5}


# -- demonstrations


class Words:
    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [len(word) for word in text.split()]

    def decode(self, tokens, **options):
        return " ".join("x" * token for token in tokens)


PIECES = [["who is it", False], ["<s> q </s>", True], ["doc", False], ["", True], ["<a> x", True]]


def test_a_demonstration_becomes_token_arrays_with_its_actions(tmp_path):
    rows = read_demonstrations(str(written(tmp_path / "d.jsonl", [{"pieces": PIECES}])))
    batch = demonstration_batch(rows, Words(), longest=20)
    assert batch.token_ids.tolist() == [3, 2, 2, 3, 1, 4, 3, 3, 1]
    assert batch.action_ids.tolist() == [-1, -1, -1, 0, 0, 0, -1, 1, 1]
    with pytest.raises(UserError, match=r"demonstration 1 has 9 tokens, 5 of them to learn; accepted: "):
        demonstration_batch(rows, Words(), longest=8)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "expected JSON lines such as"),
        ('{"pieces": [["a", 1]]}', "expected JSON lines such as"),
        ('{"pieces": [["a", true], ["b", true]]}', "the first piece is the prompt"),
        ('{"pieces": [["a", false]]}', "the first piece is the prompt"),
        ("", "no demonstrations"),
    ],
)
def test_a_malformed_file_of_demonstrations_is_named(tmp_path, line, said):
    (tmp_path / "d.jsonl").write_text(line + "\n")
    settings = {"supervised": {"every": 1, "data": str(tmp_path / "d.jsonl")}}
    with pytest.raises(UserError, match=f"^algorithm.supervised.data: .*{said}"):
        check_learner_files(config(algorithm=settings))


def test_the_laboratory_has_a_right_demonstration_of_each_question(tmp_path, monkeypatch):
    monkeypatch.setenv("UNSPIRAL_CACHE", str(tmp_path))
    made = config(
        seed=3,
        algorithm={"supervised": {"every": 3, "data": "lab:train_demonstrations:7", "rows": 8, "updates": 2}},
        rollout={"template": "lab", "max_model_tokens": 256},
    )
    tokenizer = build_tokenizer()
    shown = Supervision(made, tokenizer)
    assert [len(shown.batches(step)) for step in (1, 2, 3, 4, 6)] == [0, 0, 2, 0, 2]
    again = Supervision(made, tokenizer)
    assert [b.uid for b in again.batches(3)] == [b.uid for b in shown.batches(3)]
    assert [b.uid for b in again.batches(6)] != [b.uid for b in shown.batches(3)]
    first = shown.batches(3)[0]
    assert len(first) == 8 and (first.action_ids >= 0).any()
    text = tokenizer.decode(first.token_ids[first.row(0)])
    assert text.startswith("<bos>") and "<answer>" in text and "<unk>" not in text


class Taught(Scoring):
    """Keeps what it was given beside the batch; each update lowers every log-prob by .1."""

    def update(self, batch, *, llds_lambda, answer_beta, lr_scale, supervised=()):
        self.seen.append((lr_scale, [len(b) for b in supervised]))
        return super().update(batch, llds_lambda=llds_lambda, answer_beta=answer_beta, lr_scale=lr_scale)

    def score(self, batch):
        return Scores(np.full(len(batch.token_ids), -1.1, np.float32), np.zeros(len(batch.token_ids)))


def test_the_driver_scales_the_rate_and_shows_demonstrations_when_they_are_due(tmp_path):
    series = written(tmp_path / "series.jsonl", [{"step": s, "kl/old": 1e-3} for s in range(1, 9)])
    demonstrations = written(tmp_path / "d.jsonl", [{"pieces": PIECES}] * 3)
    made = system(
        tmp_path,
        rollout={"prompts_per_step": 2, "group_size": 2, "max_response_tokens": 9},
        trainer={"steps": 4, "checkpoint_every": 0, "eval_at_ends": False},
        probe={"fixed_size": 0},
        learner={"match_kl": str(series)},
        algorithm={"supervised": {"every": 2, "data": str(demonstrations), "rows": 2}},
    )
    made.pool, made.learner, made.store, made.tokenizer = Sampling(), Taught(), Kept(), Words()
    made.reward = lambda trajectory: float(trajectory.actions[-1].kind == "answer")
    made.learner.config, made.learner.seen = made.config, []
    made.cursor.take = lambda n: QUESTIONS[:n]
    progress = SimpleNamespace(
        stage=lambda *a: None, say=lambda line: None, trajectory=None, doing="", step=lambda *a: None
    )
    driver = Driver(made, progress, StopSignals(progress.say))
    asyncio.run(driver.run())
    assert [shown for _, shown in made.learner.seen] == [[], [2], [], [2]]
    moved = math.exp(-0.1) - 1 + 0.1
    third = math.sqrt(1e-3 / ((moved + moved / 0.25) / 2))
    scales = [scale for scale, _ in made.learner.seen]
    assert scales[:3] == pytest.approx([1.0, 0.5, third], rel=1e-4)
    lines = [json.loads(line) for line in made.folder.metrics_path.read_text().splitlines()]
    assert [line["learner/match_scale"] for line in lines] == scales
    assert lines[0]["kl/old"] == pytest.approx(moved, rel=1e-4)
    again = Driver(made, progress, StopSignals(progress.say))
    again.step = 3
    again.updates.restore(made.folder.metrics_path, 3)
    assert again.updates.matched.scale(4) == scales[3]
