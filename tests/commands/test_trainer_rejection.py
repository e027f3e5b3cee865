"""Rejection sampling: the right trajectories of a run, as they were, teach a model."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from end_to_end import command, configuration, finish
from rollout_fakes import Hit, ScriptedEngine, request
from rollout_models import searcher
from tool_families import CALLS, CONTROLS, FAMILIES, of_family, small_bpe
from transformers import AutoModelForCausalLM

from services.common.errors import UserError
from services.contracts import Question
from services.rollout.worker.loop import run_trajectory
from services.rollout.worker.plain_text import TextEncoder
from services.rollout.worker.templates import make_template
from services.settings import RolloutSettings
from trainer.commands.work.rejection import right_trajectories
from trainer.commands.work.warm_start import run_warm_start
from trainer.config.schema import load_config, parse_config
from trainer.loop.run.run_folder import RunFolder

HITS = [Hit("d0", '"Oslo"\nA "town" </information> <|im_end|>'), Hit("d1", '"Rome"\nanother')]


def sampled(template, tokenizer, settings, text, script):
    """A trajectory of the real loop."""

    async def search(query):
        return HITS

    engine = ScriptedEngine(tokenizer, script, eos_id=tokenizer.eos_token_id)
    asked = request(text, text)
    return asyncio.run(
        run_trajectory(asked, engine=engine, template=template, search=search, settings=settings)
    )


def recorded_run(folder, trajectories, rewards):
    config = parse_config(
        {
            "run": {"name": "r", "dir": str(folder)},
            "model": {"path": "m"},
            "data": {"train": "t"},
            "retriever": {"corpus": "c"},
        }
    )
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.yaml").write_text("{}")
    run = RunFolder(config)
    run.trajectories(1, trajectories, rewards)
    run.trajectories("eval_after_greedy", trajectories, rewards)
    return str(config.run_dir)


@pytest.mark.parametrize("name", ["search_r1", *FAMILIES])
def test_right_trajectories_are_given_back_as_the_tokens_that_they_were(tmp_path, name):
    tokenizer = of_family(small_bpe(), name if name in FAMILIES else "hermes")
    settings = RolloutSettings(template=name, max_obs_tokens=900, max_turns=3)
    template = make_template(name, tokenizer, settings)
    end = CONTROLS[name][-1] if name == "llama3" else ""
    call = CALLS[name] % "n1" + end if name in CALLS else "<search> n1 </search>"
    right = ["<think> x </think>" + call, "<answer> n1 </answer>"]
    scripts = {
        "right": right,
        "wrong": right,
        "invalid": ["hm" + CONTROLS["hermes" if name == "search_r1" else name][-1], *right],
        "of another set": right,
        "right too": [*right[:1], *right],
    }
    trajectories = [
        sampled(template, tokenizer, settings, text, list(script)) for text, script in scripts.items()
    ]
    again = replace(trajectories[0], uid="again")
    run = recorded_run(tmp_path, [*trajectories, again], [1.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    questions = [Question(t, t, ("n1",), "lab") for t in ("right", "wrong", "invalid", "right too")]
    said = []
    found = right_trajectories(run, questions, template, TextEncoder(tokenizer), settings, said.append)
    assert [t.uid for t in found] == ["right", "right too"]
    for one, before in zip(found, (trajectories[0], trajectories[4]), strict=True):
        for ours, theirs in zip(one.arrays()[:2], before.arrays()[:2], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert "2 of 6 trajectories are right" in said[0]
    for reason in ("1 not right", "1 of questions", "1 the same words", "1 with an invalid"):
        assert reason in said[0]
    with pytest.raises(UserError, match=r"no right trajectory of data\.train is there"):
        right_trajectories(run, questions[1:2], template, TextEncoder(tokenizer), settings, said.append)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_recipe_samples_keeps_what_is_right_and_teaches_it(tmp_path):
    """A policy that searches, then guesses one of twenty: after two of them were called right it says these
    more often."""
    searcher(tmp_path / "model")
    wanted = ("n20", "n21")
    for name, text in (("questions", "what is n1 ?"), ("eval", "what is n2 ?")):
        row = {"id": name, "question": text, "golden_answers": wanted, "data_source": "lab"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": "0", "contents": '"n1"\nn20 river'}) + "\n")
    files = SimpleNamespace(
        model=tmp_path / "model",
        train_corpus=tmp_path / "corpus.jsonl",
        train_questions=tmp_path / "questions.jsonl",
        eval_corpus=tmp_path / "corpus.jsonl",
        eval_questions=tmp_path / "eval.jsonl",
    )
    config = configuration(
        files,
        tmp_path,
        "sampled",
        rollout={"engine": "transformers", "prompts_per_step": 1, "group_size": 200},
        reward={"kind": "em"},
        learner={"lr": 1e-12, "minibatches_per_batch": 2, "epochs": 1},
        trainer={"steps": 1, "checkpoint_every": 0},
        control={"enabled": False},
    )
    code, out = finish(command("train", "--config", config), 240)
    assert code == 0, out
    said = []
    done = run_warm_start(
        load_config(config, []),
        tmp_path / "taught",
        questions=1,
        epochs=30,
        batch=4,
        lr=1e-2,
        trajectories=str(tmp_path / "sampled"),
        say=said.append,
    )
    assert any("of 200 trajectories are right" in line for line in said), said
    assert done["demonstrations"] >= 5 and done["logp_last"] > done["logp_first"] + 0.3
    AutoModelForCausalLM.from_pretrained(tmp_path / "taught")
