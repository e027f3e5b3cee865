"""What a key or an option accepts is told in our words, without those that a library puts before them."""

import json

import pytest
from command_line import fresh_folder, run  # noqa: F401

from services.common.names import nearest
from services.common.printing.messages import said


def test_a_choice_that_is_none_is_told_without_the_words_of_the_library(run):
    assert run("doctor", "--role", "x") == (
        2,
        "",
        "unspiral: --role x: accepted are workstation, retriever, likelihood, control, node\n",
    )
    status, _, err = run("likelihood", "export", "r", "o", "--to", "csv")
    assert (status, err.count("\n")) == (2, 1) and "--to csv: accepted are parquet, tensorboard, wandb" in err


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("Value error, expected a colour", "expected a colour"),
        ("Invalid value for '--a': Value error, no", "Invalid value for '--a': no"),
        ("Input should be 'Value error, '", "Input should be 'Value error, '"),
    ],
)
def test_only_what_stands_before_our_words_goes(message, told):
    assert said(message) == told


@pytest.mark.parametrize("given", ["", " "])
@pytest.mark.parametrize("option", ["--text-key", "--title-key", "--id-key"])
def test_an_empty_name_of_a_corpus_column_is_refused(run, tmp_path, option, given):
    (tmp_path / "c.jsonl").write_text('{"title": "Rome", "text": "A town."}\n')
    says = f"unspiral: {option} (of a run: retriever.{option[2:].replace('-', '_')}): is empty; "
    says += "expected a column\n"
    assert run("index", "build", "c.jsonl", "-o", "i", option, given) == (2, "", says)
    assert run("data", "validate", "c.jsonl", option, given) == (2, "", says)
    assert not (tmp_path / "i").exists()


@pytest.mark.parametrize("option", ["--question-key", "--answer-key", "--source-key", "--id-key"])
def test_an_empty_name_of_a_column_of_questions_is_refused(run, tmp_path, option):
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "who?", "answer": "Ada"}) + "\n")
    key = option[2:].replace("-", "_")
    says = f"unspiral: {option} (of a run: data.{key}): is empty; expected a column\n"
    assert run("data", "validate", "q.jsonl", option, "") == (2, "", says)
    assert run("data", "convert", "q.jsonl", "o.jsonl", option, "") == (2, "", says)


def test_a_report_goes_to_a_file_in_a_folder_that_is_there(run, tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert run("report", "m.jsonl", "-o", "/") == (
        2,
        "",
        "unspiral: --out /: is a folder; expected the name of a file\n",
    )
    assert run("report", "m.jsonl", "-o", "not/there/x.html") == (
        2,
        "",
        "unspiral: --out not/there/x.html: no folder not/there; expected a file in a folder that is there\n",
    )
    assert not (tmp_path / "not").exists()
    assert run("report", "m.jsonl", "-o", "x.html") == (0, "x.html\n", "")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("eval --config c --limit many", "--limit many: expected a whole number, at least 1"),
        ("eval --config c --limit 1.5", "--limit 1.5: expected a whole number, at least 1"),
        ("eval --config c --limit 0", "--limit 0: expected at least 1"),
        ("ask --temperature hot", "--temperature hot: expected a number, at least 0"),
        (
            "serve likelihood --port x",
            "--port x: expected a whole number, at least 0 and at most 65535",
        ),
        ("serve likelihood --port 70000", "--port 70000: expected at most 65535"),
        ("trace latest x", "STEP x: expected a whole number, at least 1"),
        (
            "doctor --role nod",
            "--role nod: accepted are workstation, retriever, likelihood, control, node; did you mean node?",
        ),
        (
            "serve retriever i --dialect zero",
            "--dialect zero: accepted are auto, zerosearch; did you mean zerosearch?",
        ),
        ("serve retriever i --dense-device gpu", "--dense-device gpu: accepted are cpu, cuda"),
        (
            "serve retriever i --encoder-dtype int4",
            "--encoder-dtype int4: accepted are auto, float32, bfloat16, float16",
        ),
        (
            "runs a.yaml",
            "a.yaml: is a file; expected a folder of runs, or a run: its folder, name, or latest",
        ),
        ("demo --dir a.yaml", "--dir a.yaml: cannot be made (File exists)"),
        (
            "config show --config runs/mine",
            "runs/mine: is a folder; expected a YAML file; runs/mine/config.yaml is one",
        ),
        ("config show --config runs", "runs: is a folder; expected a YAML file"),
        ("demo --resume best", "--resume best: accepted are latest"),
        ("serve retrievr", "retrievr: no such command; did you mean unspiral serve retriever?"),
        ("xyzzy", "xyzzy: no such command; `unspiral --help` lists those that there are"),
        ("index xyzzy", "xyzzy: no such command; `unspiral index --help` lists those that there are"),
        (
            "pause a b c",
            "pause: too many words (b c); expected `unspiral pause [OPTIONS] [RUN]`. "
            "Example: unspiral pause latest",
        ),
        (
            "index build c.jsonl --out",
            "--out: its value is missing; expected folder of the index to be made. "
            "Example: unspiral index build --corpus corpus.jsonl --out index/",
        ),
        (
            "train --config c --resume",
            "--resume: its value is missing; expected a checkpoint, a run (its folder, or its name in runs/: "
            "its newest checkpoint), to go on with; latest or best: of the run of --config, "
            "run.dir/run.name, which with latest begins at step 1 where there is none yet. "
            "Example: unspiral train --config examples/demo.yaml run.name=first",
        ),
        (
            "ask",
            "ask: no checkpoint is named; expected a checkpoint, a run or latest. "
            "Example: unspiral ask --checkpoint latest 'who wrote Hamlet?'",
        ),
    ],
)
def test_a_mistake_in_the_words_names_what_is_accepted(run, tmp_path, words, line):
    (tmp_path / "a.yaml").touch()
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").touch()
    assert run(*words.split()) == (2, "", f"unspiral: {line}\n")


def test_a_value_of_the_environment_is_told_to_come_from_there(run, monkeypatch):
    monkeypatch.setenv("UNSPIRAL_CONTROL_PORT", "many")
    assert run("serve", "control") == (
        2,
        "",
        "unspiral: --port (from UNSPIRAL_CONTROL_PORT=many): expected a whole number, at least 0 and at most "
        "65535\n",
    )


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("best", ["latest"], None),
        ("train", ["trace", "status"], None),
        ("corpus", ["control.port", "course"], None),
        ("transf", ["transformers", "vllm"], "transformers"),
        ("desne", ["dense", "bm25"], "dense"),
        ("frist", ["first"], "first"),
        ("bm52", ["bm25", "dense"], "bm25"),
        ("--conf", ["--config", "--corpus"], "--config"),
        ("em", ["em_strict", "f1"], None),
    ],
)
def test_only_a_near_name_is_offered(name, known, near):
    assert nearest(name, known) == near
