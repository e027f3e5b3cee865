"""What a shell completes: every option that takes one of a few words, runs, their steps and checkpoints."""

import json
from typing import get_args

import pytest
from command_line import COMMANDS, fresh_folder, run, runs  # noqa: F401

from retriever_service.bm25.analysis import languages
from retriever_service.dense import encoder
from retriever_service.index_folder.description import BACKENDS
from retriever_service.indexing.build import POSTINGS
from services.likelihood.exports.trainers import MAPS
from services.likelihood.records import StepRecord
from services.likelihood.store.sqlite.store import SQLiteStore
from trainer.algorithm_names import PolicyLossKind
from trainer.commands.completion import NAMED, values
from trainer.config.schema import leaf_keys
from trainer.data.models import KNOWN
from trainer.suite.methods import METHODS
from trainer.suite.rows import METRICS

FREE = {
    "--corpus", "--data", "--eval", "--index", "--out", "CORPUS", "INDEX", "OUT",  # files: the shell's own
    "--model", "--reranker", "--retriever", "--retriever_model",  # folders, or names on a hub
    "--host", "--ray-address", "--shards", "--to", "--url",  # addresses
    "--shard-token-env", "--token-env",  # the shell's variables
    "--answer-key", "--id-key", "--question-id-key", "--question-key", "--source-key",  # the user's columns
    "--text-key", "--title-key",
    "--group", "--id", "--name", "--question", "--source", "--uid", "--wandb", "ID", "QUERY", "TEXT",
}  # fmt: skip
"""Options and arguments whose text is not one of a few words."""


@pytest.fixture
def completed(run, monkeypatch):
    """The words that bash is offered for the last one."""

    def ask(*words):
        monkeypatch.setenv("_UNSPIRAL_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", " ".join(["unspiral", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        status, out, err = run()
        assert (status, err) == (0, "")
        return out.split()

    return ask


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_what_takes_text_is_completed_or_known_to_be_free(path):
    for parameter in COMMANDS[path].params:
        kind = parameter.type_descriptor
        if kind.is_choice or kind.annotation in (bool, int, float) or "Path" in str(kind.annotation):
            continue
        names = {*parameter.opts, parameter.metavar} if parameter.metavar else {*parameter.opts}
        assert parameter._custom_shell_complete is not None or names & FREE, (path, parameter.opts)


@pytest.mark.parametrize(
    ("words", "accepted"),
    [
        ("index build --backend", BACKENDS),
        ("index build --language", languages()),
        ("index build --postings", POSTINGS),
        ("index build --family", encoder.FAMILIES),
        ("index build --encoder-dtype", encoder.DTYPES),
        ("index build --type", ["Flat", "SQfp16", "SQ8", "HNSW32", "IVF,Flat", "IVF,SQ8"]),
        ("index convert --rescore-dtype", ["float16", "float32"]),
        ("serve retriever --dialect", ["auto", "zerosearch"]),
        ("serve retriever --dense-device", ["cpu", "cuda"]),
        ("serve retriever --dense-dtype", ["float32", "float16", "int8"]),
        ("serve retriever --retriever-name", ["bm25", *encoder.FAMILIES]),
        ("eval --suite", ["search7"]),
        ("eval --method", METHODS),
        ("eval --split", ["auto", "test", "dev", "train"]),
        ("eval compare --metric", METRICS),
        ("monitor replay --map", MAPS),
        ("likelihood export --to", ["parquet", "tensorboard", "wandb"]),
        ("doctor --role", ["workstation", "retriever", "likelihood", "control", "node"]),
        ("demo --resume", ["latest"]),
        ("model fetch", KNOWN),
        ("init --model", KNOWN),
        ("workers scale", ["all"]),
        ("train --allow-changed", leaf_keys()),
    ],
)
def test_the_words_that_are_accepted_are_completed(completed, words, accepted):
    offered = completed(*words.split(), "''")
    assert offered == list(accepted)
    first = offered[0]
    assert first in completed(*words.split(), first[:2]) and completed(*words.split(), "zzz") == []


@pytest.mark.parametrize(
    ("key", "accepted"),
    [
        ("algorithm.loss", get_args(PolicyLossKind)),
        ("model.path", KNOWN),
        ("trainer.best_by", ["em", "f1", "right", "em_macro"]),
        ("rollout.engine", ["vllm", "transformers"]),
        ("trainer.keep_best", ["true", "false"]),
    ],
)
def test_the_values_of_a_key_are_completed(completed, key, accepted):
    assert values(key) == list(accepted)
    assert completed("train", "--config", "c.yaml", f"{key}=") == [f"{key}={value}" for value in accepted]


def test_keys_with_words_of_their_own_are_keys():
    assert {*NAMED} <= {*leaf_keys()}


def test_runs_are_completed_by_name_and_by_path(completed, runs):
    assert completed("report", "de") == ["demo-0", "demo-1"]
    assert completed("report", "ru") == ["runs/demo-0", "runs/demo-1"]
    assert completed("export", "''") == ["latest", "best", "demo-0", "demo-1"]
    assert completed("export", "demo-1/") == ["demo-1/checkpoints/step_000090"]
    (runs.parent / "demo-0").mkdir()
    (runs.parent / "demo-0" / "config.yaml").write_text("")  # another run, which has the name here
    assert completed("report", "''") == ["latest", "runs/demo-0", "demo-1"]


def test_steps_and_evaluations_of_the_named_run_are_completed(completed, runs):
    folder = runs / "demo-0" / "trajectories"
    folder.mkdir()
    for name in ("step_000009", "step_000012", "eval_before_greedy", "eval_after_greedy"):
        (folder / f"{name}.jsonl").write_text("")
    every = ["9", "12", "eval_after_greedy", "eval_before_greedy"]
    assert completed("trajectories", "show", "demo-0", "''") == every
    assert completed("trajectories", "diff", "runs/demo-0", "9", "eval_b") == ["eval_before_greedy"]
    assert completed("trajectories", "find", "demo-0", "--step", "1") == ["12"]
    assert completed("trace", "demo-0", "''") == ["9", "12"]
    assert completed("trajectories", "show", "nowhere", "''") == []


def test_runs_of_a_store_are_completed(completed, runs):
    store = SQLiteStore(runs / "demo-1" / "likelihood.db")
    for name in ("first", "second"):
        store.put_step(name, StepRecord(step=0, metrics={"reward/mean": 0.5}))
    store.close()
    assert completed("likelihood", "prune", "demo-1", "--run", "s") == ["second"]
    assert completed("likelihood", "prune", "nowhere", "--run", "s") == []
    assert completed("serve", "likelihood", "--store", "demo-1") == ["demo-1"]


def test_completion_offers_no_word_twice(completed, runs):
    for words in (["report", "''"], ["export", "runs/"], ["train", "--config", "c", "rollout.engine="]):
        offered = completed(*words)
        assert len(offered) == len({*offered}) > 0, json.dumps(offered)


def test_commands_below_a_command_are_its_first_words(completed):
    assert completed("eval", "com") == ["compare"] and completed("eval", "''")[:2] == ["compare", "page"]
    assert completed("eval", "--config", "c.yaml", "com") == []


def test_evaluations_are_completed_where_two_are_compared(completed, runs):
    kept = ("eval/answers.jsonl", "eval/x.answers.jsonl", "eval/search7-agent/answers.jsonl")
    for file in (*(runs / "demo-0" / name for name in kept), runs.parent / "mine.answers.jsonl"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (runs / "demo-0" / "eval" / "search7-agent" / "result.json").touch()
    suite = "runs/demo-0/eval/search7-agent"
    found = ["runs/demo-0/eval", suite, "runs/demo-0/eval/x.answers.jsonl"]
    assert completed("eval", "compare", "mine.answers.jsonl", "ru") == found
    assert completed("eval", "compare", "''") == ["mine.answers.jsonl", *found]
    assert completed("eval", "page", "''") == [suite]
