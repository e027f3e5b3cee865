"""`unspiral init` and `unspiral config explain`: what a newcomer gets before the first run."""

import json
import struct
import subprocess
import sys

import pytest
from command_line import run  # noqa: F401
from places import ROOT

from trainer.commands.init import text_of
from trainer.config.explain import explain
from trainer.config.remarks import remarks
from trainer.config.schema import Config, leaf_keys, load_config
from trainer.session.preflight.sizes import parameters_by_config


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A model's folder with the header of its weights alone (half a billion parameters), and data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    header = json.dumps({"w": {"dtype": "BF16", "shape": [500_000, 1000], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model" / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"question": "who wrote the Iliad?", "answer": "Homer"}\n')
    (tmp_path / "test.jsonl").write_text('{"question": "who wrote Faust?", "answer": "Goethe"}\n')
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "text": "Homer wrote the Iliad."}\n')
    return ("--model", "model", "--data", "train.jsonl", "--corpus", "corpus.jsonl")


@pytest.mark.parametrize("gpus", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("billions", [0.5, 1.5, 3, 7])
def test_each_size_on_each_machine_is_a_configuration_without_a_remark(tmp_path, gpus, billions):
    text = text_of(
        int(billions * 1e9), gpus, model='my "model"', data="a b.jsonl", held_out="t", source='corpus: "c"'
    )
    (tmp_path / "c.yaml").write_text(text)
    config = load_config(tmp_path / "c.yaml")
    assert config.model.path == 'my "model"' and config.data.train == "a b.jsonl"
    assert remarks(config) == []
    assert config.rollout.share_gpus == (gpus == 1)
    assert config.learner.gradient_checkpointing == (gpus > 0 and billions > 1)
    # As docs/gpu.md has it: 7B on four ranks, or one with adapters; each rank takes a GPU.
    assert (config.learner.lora is not None) == (billions == 7 and 0 < gpus < 8)
    assert config.learner.ranks == ((4 if billions == 7 else 2) if gpus == 8 else 1)


def test_the_file_is_written_once_and_fits_the_model(run, files, tmp_path):
    status, out, err = run("init", *files, "--gpus", 1, "--eval", "test.jsonl")
    assert status == 0 and out.startswith("written to unspiral.yaml; next: unspiral doctor"), err
    text = (tmp_path / "unspiral.yaml").read_text()
    assert text.startswith("# Made by `unspiral init` for 0.50 B parameters on 1 GPU.\n")
    config = load_config(tmp_path / "unspiral.yaml")
    assert config.trainer.keep_best and config.learner.tokens_per_microbatch == 32768
    status, _, err = run("init", *files)
    assert (status, err) == (2, "unspiral: --out unspiral.yaml: is there already; --overwrite replaces it\n")


def test_one_of_corpus_and_index_is_required_and_held_out_questions_are_named_where_there_are_some(
    run, files, tmp_path
):
    said = " ".join(run("init", "--help")[1].replace("│", " ").split())
    assert "It, --index or --url is required." in said
    status, _, err = run("init", *files[:4])
    assert status == 2 and "give one of --corpus, --index and --url" in err
    for more, told in (((), False), (("--eval", "test.jsonl"), True)):
        (tmp_path / "unspiral.yaml").unlink(missing_ok=True)
        assert run("init", *files, "--gpus", 4, *more)[0] == 0
        text = (tmp_path / "unspiral.yaml").read_text()
        assert ("held-out" in text) == told
        assert load_config(tmp_path / "unspiral.yaml").trainer.eval_every == (10 if told else 0)


def test_what_is_wrong_with_the_questions_is_said_before_a_run(run, files, tmp_path):
    row = '{"question": "who wrote the %s?", "answer": "Homer"}\n'
    (tmp_path / "train.jsonl").write_text(row % "Iliad" + row % "Odyssey")
    (tmp_path / "test.jsonl").write_text(row % "iliad")
    status, out, err = run("init", *files, "--eval", "test.jsonl")
    assert status == 0 and "unspiral warm-start --config unspiral.yaml first" in out
    said = "note: 1 held-out question stands in train.jsonl too: unspiral data validate test.jsonl --against"
    assert err.startswith(said)
    config = load_config(tmp_path / "unspiral.yaml", ["trainer.patience=5"])
    assert config.trainer.eval_every == config.trainer.steps == 3 and config.evaluation.limit == 20
    (tmp_path / "train.jsonl").write_text('{"title": "a", "text": "b"}\n')
    status, _, err = run("init", *files, "--out", "second.yaml")
    assert status == 2 and err.startswith("unspiral: train.jsonl: 1 of 1 rows are malformed: these are")
    assert not (tmp_path / "second.yaml").exists()


def test_without_a_gpu_the_values_are_small(tmp_path):
    text = text_of(135_000_000, 0, model="m", data="d.jsonl", held_out="t", source='corpus: "c"')
    (tmp_path / "c.yaml").write_text(text)
    config = load_config(tmp_path / "c.yaml")
    example = load_config(ROOT / "examples" / "wiki_qa_smollm2.yaml")
    for key in (
        *("prompts_per_step", "group_size", "max_turns"),
        *("max_prompt_tokens", "max_response_tokens", "max_obs_tokens", "max_model_tokens"),
    ):
        assert getattr(config.rollout, key) == getattr(example.rollout, key), key
    assert config.reward.kind == "format" and config.learner.lr == 1e-5 and config.trainer.steps == 3
    assert config.learner.tokens_per_microbatch >= config.rollout.max_model_tokens
    on_gpu = text_of(135_000_000, 1, model="m", data="d.jsonl", held_out="t", source='corpus: "c"')
    assert "max_response_tokens" not in on_gpu and "reward:" not in on_gpu


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--index", "corpus.jsonl"), "init: give one of --corpus, --index and --url"),
        (("--eval", "nowhere.jsonl"), "--eval nowhere.jsonl: no such file or folder"),
    ],
)
def test_what_cannot_be_is_one_line(run, files, more, says):
    status, _, err = run("init", *files, *more)
    assert status == 2 and says in err and err.count("\n") == 1


def test_every_key_is_explained_with_its_default():
    nested = (
        *(f"algorithm.{name}" for name in ("llds", "importance", "overlong", "batch_kl", "supervised")),
        *("learner.lora", "monitor.rules", "evaluation.retriever"),
    )
    told = "\n".join(explain(name) for name in (*Config.model_fields, *nested))
    assert [key for key in leaf_keys() if f"{key} (default: " not in told] == []
    assert "learner.lr (default: 1e-06)\n    Learning rate of AdamW." in told
    assert "model.path (default: none; must be given)" in told
    assert max(len(line) for line in told.splitlines() if "(default: " not in line) <= 110


def test_sections_are_listed_and_a_misspelt_key_names_the_nearest(run):
    status, out, _ = run("config", "explain")
    assert status == 0 and "learner       The optimiser side." in out
    status, out, _ = run("config", "explain", "algorithm.llds.lambda")
    assert status == 0 and out.startswith("algorithm.llds.lambda (default: ")
    status, _, err = run("config", "explain", "learner.lrr")
    assert status == 2 and "no key lrr; did you mean lr?" in err
    status, _, err = run("config", "explain", "lambda")
    assert status == 2 and "no key lambda; did you mean algorithm.llds.lambda?" in err
    status, _, err = run("config", "explain", "learner.lr.x")
    assert status == 2 and "config explain learner.lr.x: learner.lr holds no keys" in err


def test_a_running_retriever_is_named_by_its_address(run, files, tmp_path):
    status, _, err = run("init", *files[:4], "--url", "http://127.0.0.1:8000")
    assert status == 0, err
    config = load_config(tmp_path / "unspiral.yaml")
    assert (config.retriever.url, config.retriever.corpus) == ("http://127.0.0.1:8000", None)
    for wrong in ("here", "http://", "ftp://a", "http://a:99999", "http://a b:8000", "", "http://a?b"):
        (tmp_path / "unspiral.yaml").unlink(missing_ok=True)
        status, _, err = run("init", *files[:4], "--url", wrong)
        assert status == 2 and err.startswith(f"unspiral: --url {wrong!r}: ") and err.count("\n") == 1
        assert "expected the address of a retriever, such as http://127.0.0.1:8000" in err
        assert not (tmp_path / "unspiral.yaml").exists()


def test_overwrite_replaces_the_file_that_is_there(run, files, tmp_path):
    (tmp_path / "unspiral.yaml").write_text("mine")
    assert run("init", *files)[0] == 2 and (tmp_path / "unspiral.yaml").read_text() == "mine"
    assert run("init", *files, "--overwrite")[0] == 0
    assert (tmp_path / "unspiral.yaml").read_text().startswith("# Made by `unspiral init`")


@pytest.mark.parametrize("option", ["--data", "--eval", "--corpus"])
def test_overwrite_replaces_nothing_that_the_configuration_would_read(run, files, tmp_path, option):
    (tmp_path / "here.jsonl").write_text("mine")
    (tmp_path / "link.yaml").symlink_to("here.jsonl")
    given = dict(zip(files[::2], files[1::2], strict=True)) | {option: "here.jsonl"}
    words = [word for pair in given.items() for word in pair]
    for out in ("here.jsonl", "link.yaml"):
        expected = f"unspiral: --out {out}: is what {option} reads; give another file to write\n"
        assert run("init", *words, "--out", out, "--overwrite") == (2, "", expected)
    assert (tmp_path / "here.jsonl").read_text() == "mine"


@pytest.mark.parametrize("option", ["--data", "--eval", "--corpus", "--index"])
def test_an_empty_value_is_not_the_current_folder(run, files, tmp_path, option):
    given = dict(zip(files[::2], files[1::2], strict=True)) | {option: ""}
    if option == "--index":
        del given["--corpus"]
    words = [word for pair in given.items() for word in pair]
    assert run("init", *words) == (2, "", f"unspiral: {option}: is empty; expected a file or folder\n")
    assert not (tmp_path / "unspiral.yaml").exists()


def test_an_index_may_be_a_function_of_ones_own_which_is_looked_for_at_once(
    run, files, tmp_path, monkeypatch
):
    (tmp_path / "inits_search.py").write_text("def overlap(query, topk):\n    return []\n")
    monkeypatch.syspath_prepend(tmp_path)
    given = dict(zip(files[::2], files[1::2], strict=True))
    del given["--corpus"]
    words = [word for pair in given.items() for word in pair]
    status, out, err = run("init", *words, "--index", "inits_search:overlp")
    said = "unspiral: --index=inits_search:overlp: cannot be imported: inits_search has no `overlp`; it has: "
    assert (status, out) == (2, "") and err.startswith(said)
    assert not (tmp_path / "unspiral.yaml").exists()
    assert run("init", *words, "--index", "inits_search:overlap")[0] == 0
    assert 'index: "inits_search:overlap"' in (tmp_path / "unspiral.yaml").read_text()


QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}


def test_a_7b_is_planned_by_its_config_without_its_weights(run, files, tmp_path):
    (tmp_path / "planned").mkdir()
    (tmp_path / "planned" / "config.json").write_text(json.dumps(QWEN_7B))
    status, _, err = run("init", "--model", "planned", *files[2:], "--gpus", 8)
    assert (
        status == 0 and "note: planned: no weights there yet; its size is taken from its config.json" in err
    )
    text = (tmp_path / "unspiral.yaml").read_text()
    # 7,615,616,512 by its weights; its query, key and value have 129,024 biases more than are counted.
    assert parameters_by_config(tmp_path / "planned") == 7_615_616_512 - 28 * (3584 + 2 * 512)
    assert text.startswith("# Made by `unspiral init` for 7.62 B parameters on 8 GPUs.\n")
    assert load_config(tmp_path / "unspiral.yaml").learner.ranks == 4
    for more, says in (
        ({"num_experts": 8}, "it has experts; fetch"),
        ({"vocab_size": "x"}, "sizes of a decoder"),
    ):
        (tmp_path / "planned" / "config.json").write_text(json.dumps(QWEN_7B | more))
        status, _, err = run("init", "--model", "planned", *files[2:], "--overwrite")
        assert status == 2 and says in err and err.count("\n") == 1


def test_a_right_answer_in_a_wrong_form_is_right_where_init_chose_the_reward_and_told_of_elsewhere(tmp_path):
    text = text_of(135_000_000, 0, model="m", data="d.jsonl", held_out="t", source='corpus: "c"')
    (tmp_path / "c.yaml").write_text(text)
    assert load_config(tmp_path / "c.yaml").reward.right_at == 0.8
    (told,) = remarks(load_config(tmp_path / "c.yaml", ["reward.right_at=null"]))
    assert told.startswith("reward.kind=format gives a right answer in a wrong form 0.8")
    assert told.endswith("reward.right_at=0.8 calls it right")


def test_the_demos_model_is_a_name_here_too():
    code = "import trainer.commands.init; from trainer.data.models import is_there; assert is_there('lab:0')"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
