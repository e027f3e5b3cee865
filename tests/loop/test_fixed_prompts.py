"""`unspiral displacement`: what one update does to answers to fixed prompts, from fixed weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from learner_world import make_config, start_rank
from places import ROOT
from rollout_models import bigram_model

from services.common.errors import UserError
from services.likelihood.exports.fixed_prompts import FOLDER, drawing, measured, points
from services.likelihood.exports.report import write_report
from trainer.config.schema import parse_config
from trainer.loop.update import similarity
from trainer.loop.update.fixed_prompts import Group, Response, settings_for, summary

LR = 0.05


def guesser(folder: Path) -> Path:
    """A policy that answers n20 or n21 by the toss of a coin; after "then" always n22."""
    either = {"n20": 0.5, "n21": 0.5}
    closed = {f"n{i}": {"</answer>": 1.0} for i in range(20, 23)}
    bigram_model(folder, {"?": {"<answer>": 1.0}, "<answer>": either, **closed})
    return folder


def run_of(tmp_path: Path) -> Path:
    """A run's folder with a checkpoint of step 3, and its questions: n20 is right, n29 cannot be."""
    guesser(tmp_path / "model")
    questions = [{"id": str(i), "question": f"where is n{i} ?", "golden_answers": ["n20"]} for i in range(5)]
    questions.append({"id": "5", "question": "where is n5 ?", "golden_answers": ["n29"]})
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(q) + "\n" for q in questions))
    run = tmp_path / "runs" / "coin"
    raw = {
        "rollout": {
            "engine": "transformers", "template": "lab", "max_response_tokens": 8, "max_obs_tokens": 32,
            "max_model_tokens": 64,
        },
        "learner": {"lr": LR, "zero_stage": 0, "tokens_per_microbatch": 512},
        "data": {"train": str(file)},
        "run": {"name": "coin", "dir": str(tmp_path / "runs")},
    }  # fmt: skip
    config = make_config(tmp_path / "model", **raw)
    rank = start_rank(config, tmp_path / "model")
    rank.save(str(run / "checkpoints" / "step_000003"), {})
    (run / "config.yaml").write_text(json.dumps(config.model_dump(mode="json", by_alias=True)))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 3, "reward/mean": 0.5}) + "\n")
    return run


def test_the_command_measures_each_group_from_the_checkpoints_weights_and_the_report_draws_it(tmp_path):
    run = run_of(tmp_path)
    weights = (run / "checkpoints/step_000003/weights/model.safetensors").read_bytes()
    command = [sys.executable, "-m", "trainer", "displacement", str(run), "--samples", "6", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (run / "checkpoints/step_000003/weights/model.safetensors").read_bytes() == weights
    kept = json.loads((run / FOLDER / "step_000003.json").read_text())
    assert (kept["step"], kept["samples"], kept["lr"]) == (3, 6, LR)
    assert json.loads(done.stdout.splitlines()[0]) == kept["summary"]
    assert [group["question"] for group in kept["groups"]] == [f"where is n{i} ?" for i in range(6)]
    assert all(len(group["responses"]) == 6 for group in kept["groups"])
    taught = [g for g in kept["groups"] if len({r["right"] for r in g["responses"]}) == 2]
    assert len(taught) >= 2  # five coins, six times each
    for group in kept["groups"]:
        for answer in group["responses"]:
            assert answer["tokens"] == 3 and answer["searches"] == 0
            if group not in taught:
                assert answer["displacement"] is None
            else:
                # The tags are certain, so that all of the change is that of one token in three.
                assert (answer["displacement"] > 0) == answer["right"] and answer["displacement"] != 0
    # A group feels no other group's step: the same number of right answers is the same displacement.
    by_count = {}
    for group in taught:
        right = [r["displacement"] for r in group["responses"] if r["right"]]
        assert max(right) - min(right) < 1e-6
        by_count.setdefault(len(right), []).append(right[0])
    assert all(max(values) - min(values) < 1e-3 for values in by_count.values())
    assert kept["summary"]["moved"] == 6 * len(taught) and kept["summary"]["right"]["fell"] == 0
    # A state is the last word alone: n20 and n21 have nothing in common, and two right answers are one. The
    # tag before the toss is shared by all, and three tokens by two answers that are the same.
    alike = kept["summary"]["similarity"]
    assert alike["groups"] == len(taught) and alike["right_wrong"]["shared_tokens"] == 1.0
    mixed = sum(n * (6 - n) for n in (sum(r["right"] for r in g["responses"]) for g in taught))
    assert alike["right_wrong"]["pairs"] == alike["right_wrong"]["compared"] == mixed
    assert abs(alike["right_wrong"]["cosine"]) < 1e-6 and alike["right_right"]["cosine"] is None
    assert alike["right_right"]["shared_tokens"] in (None, 3.0) and taught[0]["similarity"]["right_wrong"]
    page = write_report([run], tmp_path / "paper.html", paper=True).read_text()
    figures = json.loads(page.split('id="frozen">')[1].split("</script>")[0])["paper"]
    assert figures[-1]["drawing"].count("<circle") == kept["summary"]["right"]["responses"]
    assert (
        "right with wrong" in figures[-1]["drawing"] and "cosine of hidden states" in figures[-1]["drawing"]
    )
    assert "coin, step 3: 0 of" in figures[-1]["drawing"] and "Not measured" not in figures[-1]["note"]


def answer(right, displacement):
    return {"right": right, "displacement": displacement}


def test_the_figure_orders_groups_by_their_right_answers_and_leaves_out_those_without_a_step():
    groups = [
        {"responses": [answer(True, 0.2), answer(False, -0.3)]},
        {"responses": [answer(False, None), answer(False, None)]},
        {"responses": [answer(True, -0.1), answer(False, -0.2)]},
    ]
    assert points(groups) == [(0, -0.1, True), (0, -0.2, False), (1, 0.2, True), (1, -0.3, False)]
    made = drawing("a <b>", [{"step": 7, "groups": groups}, {"step": 9, "groups": groups[1:2]}])
    assert made.count("<svg") == 2 and made.count("<circle") == 2 and made.count("<path") == 2
    assert "a &lt;b&gt;, step 7: 1 of 2 right answers lost likelihood, median +0.0500; 2 of 2 wrong" in made
    assert "step 9: no group taught anything" in made


def test_a_file_of_another_form_is_named(tmp_path):
    assert measured(tmp_path) == []
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "step_1.json").write_text('{"step": 1}')
    with pytest.raises(UserError, match=r"step_1\.json: not a file that unspiral displacement wrote"):
        measured(tmp_path)


def test_the_summary_counts_right_and_wrong_answers_of_groups_that_made_a_step():
    def response(right, value):
        return Response(right, float(right), 0.0, 3, 0, value)

    groups = [
        Group("a", [response(True, -0.1), response(True, 0.3), response(False, -0.5)]),
        Group("b", [response(False, None)] * 3),
    ]
    assert summary(groups) == {
        "prompts": 2,
        "responses": 6,
        "moved": 3,
        "right": {"responses": 2, "fell": 0.5, "median": pytest.approx(0.1)},
        "wrong": {"responses": 1, "fell": 1.0, "median": -0.5},
        "similarity": similarity.summary([]),
    }


def test_one_update_is_measured_in_float32_and_of_all_weights():
    raw = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "retriever": {"corpus": "c"}}
    half = parse_config(raw | {"learner": {"dtype": "bfloat16"}})
    assert settings_for(half, 3, 4).learner.dtype == "float32"
    adapters = parse_config(raw | {"learner": {"lora": {"rank": 4}}})
    with pytest.raises(UserError, match=r"displacement: learner\.lora is set"):
        settings_for(adapters, 3, 4)
