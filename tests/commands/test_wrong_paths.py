"""A path of the wrong kind: one line says what is there, and what was expected."""

import os
import subprocess
import sys

import pytest
from command_line import run  # noqa: F401
from places import ROOT

from services.common.errors import UserError
from services.common.runs.paths import no_run_in
from trainer.config.schema import parse_config
from trainer.session.preflight.retrievers import check_retrievers


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "a b"}\n')
    (tmp_path / "faiss.index").write_bytes(b"IxFI" + bytes(60))
    (tmp_path / "shots").mkdir()
    (tmp_path / "shots" / "a.png").write_bytes(b"png")
    return tmp_path


A_CORPUS = (
    "index corpus.jsonl: a file, and no index's folder; `unspiral index build --corpus corpus.jsonl --out "
    "DIR` makes one of a corpus, and a configuration takes the corpus itself as retriever.corpus\n"
)


@pytest.mark.parametrize(
    "words",
    [
        ("index", "search", "--index", "corpus.jsonl", "q"),
        ("index", "info", "corpus.jsonl"),
        ("serve", "retriever", "--index", "corpus.jsonl"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_corpus_given_as_an_index_is_told_where_it_goes(run, words):
    assert run(*words) == (2, "", f"unspiral: {A_CORPUS}")


def test_so_is_one_in_a_configuration():
    base = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}
    with pytest.raises(UserError) as e:
        check_retrievers(parse_config(base | {"retriever": {"index": "corpus.jsonl"}}))
    assert f"{e.value}\n" == f"retriever.index: {A_CORPUS.removeprefix('index ')}"


def test_a_faiss_file_is_called_one(run):
    assert run("index", "info", "faiss.index")[2] == (
        "unspiral: index faiss.index: a FAISS file; it is served beside its corpus, by `unspiral serve "
        "retriever --index faiss.index --corpus FILE`\n"
    )
    assert run("serve", "retriever", "faiss.index")[2] == (
        "unspiral: index faiss.index is a FAISS file: it needs --corpus_path, the JSONL file that it was "
        "made from\n"
    )


def test_an_index_that_is_not_there_and_a_folder_that_is_none_are_told_apart(run):
    build = "`unspiral index build --corpus FILE --out"
    search = ("index", "search", "q", "--index")
    assert run(*search, "nope")[2] == f"unspiral: index nope: no such folder; {build} nope` makes one\n"
    assert run(*search, "shots")[2] == (
        f"unspiral: index shots: no index: it has no meta.json; {build} DIR` makes one\n"
    )


@pytest.mark.parametrize(
    "words",
    [
        ("report", "shots"),
        ("monitor", "replay", "shots"),
        ("trace", "shots", "1"),
        ("trajectories", "show", "shots"),
        ("trajectories", "find", "shots", "a"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_folder_that_is_no_runs_is_called_so(run, place, words):
    assert run(*words) == (2, "", f"unspiral: shots: {no_run_in(place / 'shots')}\n")
    assert no_run_in(place / "shots") == (
        f"no run's folder: {place}/shots has none of metrics.jsonl, events.jsonl, config.yaml; `unspiral "
        "runs` lists those in runs/"
    )


def test_no_store_is_made_in_a_folder_that_is_not_there(run, place):
    for store in ("nope/x.db", "sqlite:nope/x.db"):
        assert run("serve", "likelihood", "--store", store, "--port", "0") == (
            2,
            "",
            f"unspiral: --store {store}: no folder nope; expected a file in a folder that is there (the file "
            "itself may be new), redis://HOST:PORT/DB, a run's folder, a folder of runs, or latest\n",
        )
    assert not (place / "nope").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "likelihood", "corpus.jsonl", "--port", "0"),
        ("likelihood", "export", "--store", "corpus.jsonl", "out"),
        ("likelihood", "prune", "corpus.jsonl", "--keep-steps", "1"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_file_that_is_no_store_is_a_mistake_of_the_users(run, words):
    pytest.importorskip("fastapi")
    says = "unspiral: likelihood store corpus.jsonl: a file, and no SQLite database; give another file\n"
    assert run(*words) == (2, "", says)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("monitor", "replay", "m.jsonl", "--rules", "nope"), "--rules nope: cannot be read (No such file"),
        (("monitor", "replay", "m.jsonl", "--rules", "r.yaml"), "--rules r.yaml: nope: unknown key; accept"),
        (("data", "validate", "q.jsonl", "--against", "nope"), "--against nope: no such file or folder"),
        (("data", "validate", "q.jsonl", "--against", "shots"), "--against shots: a folder without data"),
        (
            ("data", "validate", "q.jsonl", "--against", "corpus.jsonl"),
            "--against corpus.jsonl: none of its 1 rows could be compared, the first: corpus.jsonl, line 1: ",
        ),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, tuple) else None,
)
def test_a_line_about_an_options_file_names_the_option(run, place, words, says):
    (place / "m.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    (place / "q.jsonl").write_text('{"id": "q", "question": "who?", "golden_answers": ["Ada"]}\n')
    (place / "r.yaml").write_text("nope: 1\n")
    status, _, err = run(*words)
    assert status == 2 and err.startswith(f"unspiral: {says}") and err.count("\n") == 1


def test_a_run_given_as_an_evaluation_is_called_a_run(run, place):
    (place / "runs" / "demo-0").mkdir(parents=True)
    (place / "runs" / "demo-0" / "metrics.jsonl").write_text("{}\n")
    kept = "what `unspiral eval` has kept: a folder with answers.jsonl, or a file NAME.answers.jsonl"
    says = f"eval compare: one evaluation given; expected `eval compare A B`, each {kept}"
    assert run("eval", "compare", "demo-0") == (2, "", f"unspiral: {says}\n")
    no_evaluation = f"unspiral: runs/demo-0: a run's folder, and no evaluation; expected {kept}"
    assert run("eval", "compare", "demo-0", "nope") == (2, "", f"{no_evaluation}\n")
    answers = place / "runs" / "demo-0" / "eval" / "held.answers.jsonl"
    answers.parent.mkdir()
    answers.write_text("")
    line = f"{no_evaluation}; there is runs/demo-0/eval/held.answers.jsonl\n"
    assert run("eval", "compare", "demo-0", "nope") == (2, "", line)


CONFIG = "{model: {path: m}, data: {train: t, eval: corpus.jsonl}, retriever: {corpus: c}}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["eval", "--config", "c.yaml", "--checkpoint", "bset"],
            "checkpoint bset: no such folder; did you mean best?",
        ),
        (
            ["train", "--config", "c.yaml", "run.name=used"],
            "run.name: runs/used holds a run already; choose another run.name, or begin it anew (it has no "
            "checkpoint) by --resume latest",
        ),
    ],
    ids=["eval", "train"],
)
def test_a_misspelt_or_a_used_name_is_told_before_anything_heavy_is_loaded(tmp_path, words, says):
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "runs" / "used").mkdir(parents=True)
    (tmp_path / "runs" / "used" / "metrics.jsonl").write_text('{"step": 1}\n')
    code = (
        "import sys\nfrom trainer.commands.cli import app\ntry:\n"
        f"    app({words}, standalone_mode=False)\n"
        "except Exception as error:\n    print(error)\n"
        "print(sorted({'torch', 'ray', 'vllm'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.stdout.splitlines() == [says, "[]"], done.stderr


def test_a_configuration_or_a_page_given_as_data_is_told_by_its_ending(run, tmp_path):
    (tmp_path / "c.yaml").write_text(f"# What it runs, with a, b\n{CONFIG}\n")
    (tmp_path / "page.HTML").write_text("a,b\n1,2\n")
    for name, ending in (("c.yaml", ".yaml"), ("page.HTML", ".HTML")):
        assert run("data", "validate", name) == (
            2,
            "",
            f"unspiral: {name}: {ending} files hold no rows; expected JSON Lines, JSON, CSV, TSV, Parquet or "
            "Arrow\n",
        )
    (tmp_path / "rows.yaml").write_text('{"question": "q", "golden_answers": ["a"]}\n')
    assert run("data", "validate", "rows.yaml")[0] == 0, "what it holds is known all the same"
