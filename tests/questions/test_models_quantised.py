"""Models with quantised weights: a run refuses them before anything is loaded; an engine may take them."""

import json
from pathlib import Path

import pytest

from services.common.errors import UserError
from trainer.commands.checks.doctor_files import check_files
from trainer.commands.cli import main
from trainer.config.schema import load_config
from trainer.data.models import check_trainable, quantised, resolve
from trainer.learner.model.model_folder import fault_of_model_folder

LINE = (
    "quantised weights ({}), which cannot be trained; expected the model that they were made from, in "
    "bfloat16, float16 or float32"
)
OF_CONFIG = "quantization_config of config.json"


@pytest.fixture
def folder(tmp_path):
    """What a run looks for in a model's folder, with nothing in it."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (made / "tokenizer.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"")
    return made


@pytest.fixture
def config(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = {"id": "q1", "question": "where ?", "golden_answers": ["here"]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": "1", "contents": "here"}) + "\n")
    raw = {
        "run": {"dir": "runs"},
        "model": {"path": str(folder)},
        "data": {"train": "questions.jsonl"},
        "retriever": {"corpus": "corpus.jsonl"},
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(raw))
    return str(tmp_path / "mine.yaml")


def quantise(folder, form):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": form}))


@pytest.mark.parametrize(
    "form",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ],
    ids=lambda form: form["quant_method"],
)
def test_a_form_that_the_configuration_names_is_refused_by_its_name(folder, form):
    quantise(folder, form)
    line = LINE.format(f"{OF_CONFIG}: {form['quant_method']}")
    with pytest.raises(UserError) as e:
        check_trainable(folder, "./mine")
    assert str(e.value) == f"model.path ./mine: {line}"
    assert fault_of_model_folder(folder) == f"model.path: {folder}: {line}", "where a rank's host has another"


@pytest.mark.parametrize("form", [{"bits": 4}, "fp8"], ids=["no method", "no object"])
def test_a_form_without_a_name_is_refused_too(folder, form):
    quantise(folder, form)
    assert quantised(folder) == OF_CONFIG


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_an_older_tools_own_file_says_it_too(folder, file):
    (folder / file).write_text("{}")
    assert quantised(folder) == file


def test_weights_as_they_are_can_be_trained(folder):
    assert check_trainable(folder, "mine") == folder
    quantise(folder, None)  # as Transformers writes it of a model that was quantised before
    assert check_trainable(folder, "mine") == folder
    assert fault_of_model_folder(folder) is None


def test_a_model_that_is_only_asked_may_be_quantised(folder):
    quantise(folder, {"quant_method": "awq"})
    assert resolve(str(folder)) == folder


@pytest.mark.parametrize("command", ["train", "warm-start"])
def test_a_run_ends_with_one_line_before_it_has_a_folder(folder, config, tmp_path, capsys, command):
    pytest.importorskip("ray")
    quantise(folder, {"quant_method": "gptq"})
    out = ["--out", str(tmp_path / "out")] if command == "warm-start" else []
    with pytest.raises(SystemExit) as e:
        main([command, "--config", config, *out])
    line = LINE.format(f"{OF_CONFIG}: gptq")
    assert (e.value.code, capsys.readouterr().err) == (2, f"unspiral: model.path {folder}: {line}\n")
    assert not (tmp_path / "runs").exists() and not (tmp_path / "out").exists()


def test_the_doctor_says_it(folder, config):
    quantise(folder, {"quant_method": "fp8"})
    (found,) = [f for f in check_files(Path(config), load_config(config)) if f.what == "model.path"]
    assert (found.level, found.advice) == ("bad", LINE.format(f"{OF_CONFIG}: fp8"))
