"""Random weights in the shapes of the papers' models: made as their makers describe them, and taken by the
system."""

from __future__ import annotations

import json
import subprocess

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.shape_pass import SHAPES, main, passed, reduced, shallow
from trainer.data.models import resolve
from trainer.lab.tokenizer import build_tokenizer

PARAMETERS = {"qwen2.5-0.5b": 494e6, "qwen2.5-3b": 3.086e9, "qwen2.5-7b": 7.616e9, "llama3.2-3b": 3.213e9}
"""Of the models themselves."""


@pytest.mark.parametrize("name", SHAPES)
def test_a_true_size_has_as_many_parameters_as_the_model_and_a_reduced_one_its_proportions(name):
    import torch

    shape = SHAPES[name]
    settings = {key: value for key, value in shape.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(shape["model_type"], **settings))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(PARAMETERS[name], rel=0.002)
    small = reduced(shape, 300)
    assert (
        small["vocab_size"] == 320
        and small["head_dim"] * small["num_attention_heads"] == small["hidden_size"]
    )
    for key in ("num_attention_heads", "num_key_value_heads", "tie_word_embeddings"):
        assert small[key] == shape[key]
    few = shallow(shape, 300, 1)
    assert few == shape | {"num_hidden_layers": 1, "vocab_size": 320}


@pytest.mark.parametrize(
    "arguments",
    [
        ["llama3.2-3b", "--reduced"],
        ["llama3.2-3b", "--untied", "--reduced"],
        ["qwen2.5-7b", "--reduced"],
        ["qwen2.5-3b", "--layers", "1"],
    ],
)
def test_a_folder_that_the_system_takes_is_made(tmp_path, arguments, capsys):
    main([*arguments, "--only-model", str(tmp_path / "out")])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    folder = resolve(tmp_path / "out" / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert said["parameters"] == sum(p.numel() for p in model.parameters())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == said["tied"] == (arguments[0] != "qwen2.5-7b" and "--untied" not in arguments)
    assert said["layers"] == model.config.num_hidden_layers
    assert (model.config.hidden_size == SHAPES[arguments[0]]["hidden_size"]) == ("--layers" in arguments)
    assert model.config.vocab_size > len(build_tokenizer()), "rows that no token has"


def test_at_once_is_one_run_with_one_checkpoint_and_no_resume(tmp_path, monkeypatch):
    ran = []

    def run(command, **options):
        ran.append(command[3:])
        (tmp_path / "shape").mkdir(exist_ok=True)
        steps = [{"step": step, "mismatch/abs_logp": 0.01} for step in (1, 2)]
        (tmp_path / "shape" / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
        (tmp_path / "scores.json").write_text('{"overall": {"n": 8}}')

    monkeypatch.setattr("benchmarks.shape_pass.subprocess.run", run)
    found = passed(tmp_path, ["learner.lora.rank=16"], "float32", at_once=True)
    assert [command[0] for command in ran] == ["train", "export", "eval"] == [*found["seconds"]]
    assert "trainer.checkpoint_every=2" in ran[0] and "learner.lora.rank=16" in ran[0]
    ran.clear()
    (tmp_path / "passed.json").unlink()
    passed(tmp_path, [], "float32")
    assert [command[0] for command in ran] == ["train", "train", "export", "eval"]
    assert "trainer.steps=1" in ran[0] and "--resume" in ran[1]


def test_a_pass_that_was_cut_goes_on_after_the_last_part_that_ended(tmp_path, monkeypatch, capsys):
    ran = []
    dies_in = ["export"]

    def run(command, **options):
        part = command[3]
        ran.append(part)
        assert not (out / "export").exists(), "a half-written export is taken away"
        if part in dies_in:
            (out / "export").mkdir()
            raise subprocess.CalledProcessError(137, command)
        (out / "shape").mkdir(exist_ok=True)
        steps = [{"step": step, "mismatch/abs_logp": 0.01} for step in (1, 2)]
        (out / "shape" / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
        (out / "scores.json").write_text('{"overall": {"n": 8}}')

    made = []
    monkeypatch.setattr("benchmarks.shape_pass.make_model", lambda *a, **k: made.append(a) or 7)
    monkeypatch.setattr("benchmarks.shape_pass.subprocess.run", run)
    out = tmp_path / "out"
    with pytest.raises(subprocess.CalledProcessError):
        main(["qwen2.5-3b", str(out), "--reduced", "learner.lora.rank=16"])
    assert ran == ["train", "train", "export"]
    dies_in.clear()
    ran.clear()
    capsys.readouterr()
    main(["qwen2.5-3b", str(out), "--reduced", "learner.lora.rank=16"])
    assert ran == ["export", "eval"] and len(made) == 1
    said = capsys.readouterr().out
    assert "s, in an earlier call" in said
    found = json.loads(said.splitlines()[-1])
    assert [*found["seconds"]] == ["train", "resume", "export", "eval"] and found["evaluated"] == 8


def test_a_folder_of_something_else_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.shape_pass.make_model", lambda *a, **k: 7)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").touch()
    main(["qwen2.5-3b", str(tmp_path / "out"), "--only-model", "--reduced"])
    for arguments in (["qwen2.5-3b", str(mine)], ["qwen2.5-7b", str(tmp_path / "out"), "--reduced"]):
        with pytest.raises(SystemExit):
            main([*arguments, "--only-model"])
        assert "holds something else" in capsys.readouterr().err
