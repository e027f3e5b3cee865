"""What people get wrong, told in one line: bad files, numbers, places, and signals at the wrong moment."""

import contextlib
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pytest
from fastapi.testclient import TestClient
from pyarrow import parquet

from retriever_service.indexing.scan import Scanner
from services.common.errors import UserError
from services.likelihood.records import MAX_STEP, StepRecord
from services.likelihood.rest.server import create_app
from services.likelihood.store.sqlite.store import SQLiteStore
from trainer.commands.cli import main
from trainer.data.models import check_folder

QUESTION = b'{"id": "a", "question": "q?", "golden_answers": ["x"]}\n'
STEP = b'{"step": 0, "reward/mean": 0.5}\n'
HALF_PAIR = b'{"id": "\\ud800", "question": "q?", "golden_answers": ["x"]}\n'
DEEP = b"[" * 100_000 + b"\n"
LONG = "/tmp/" + "n" * 300 + ".jsonl"


def call(*argv):
    """(status, stdout, stderr) of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as e:
        main([str(a) for a in argv])
    return e.value.code, out.getvalue(), err.getvalue()


def refused(*argv, says, status=2):
    code, _, err = call(*argv)
    assert code == status, err
    assert err.count("\n") == 1, err
    assert str(says) in err


def written(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def damaged_parquet(path, **columns):
    """Valid but for one text, which is no UTF-8."""
    parquet.write_table(pyarrow.table(columns), path, compression="none", use_dictionary=False)
    return written(path, path.read_bytes().replace(b"zzzzzzzz", b"z\xff\xfezzzzz"))


def index_of(tmp_path):
    corpus = written(tmp_path / "c.jsonl", b'{"id": "1", "contents": "\\"T\\"\\nword"}\n')
    return corpus, tmp_path / "index"


@pytest.mark.parametrize("line", [DEEP, HALF_PAIR])
def test_a_row_that_is_nested_too_deep_or_no_text_is_named_by_its_line(tmp_path, line):
    path = written(tmp_path / "q.jsonl", QUESTION + line)
    refused("data", "convert", path, tmp_path / "o.jsonl", says=f"{path}, line 2: ")
    refused("data", "validate", path, says="1 of 2 rows")


def test_a_whole_surrogate_pair_is_text(tmp_path):
    path = written(tmp_path / "q.jsonl", QUESTION.replace(b"q?", b"\\ud83d\\ude00?"))
    assert call("data", "convert", path, tmp_path / "o.jsonl")[0] == 0
    assert "😀?" in (tmp_path / "o.jsonl").read_text(encoding="utf-8")


def test_parquet_with_text_that_is_no_utf8_is_refused(tmp_path):
    path = damaged_parquet(tmp_path / "q.parquet", question=["zzzzzzzz"], golden_answers=[["x"]])
    refused("data", "validate", path, says=path)
    corpus = damaged_parquet(tmp_path / "c.parquet", id=["1"], contents=["zzzzzzzz"])
    refused("index", "build", "--corpus", corpus, "--out", tmp_path / "i", says=corpus)


@pytest.mark.parametrize(
    "extra", [{"extra_info": {"index": "abc", "split": 5}, "ability": 7}, {"extra_info": {"index": 10**30}}]
)
def test_odd_columns_do_not_stop_a_conversion(tmp_path, extra):
    row = json.loads(QUESTION) | extra
    path = written(tmp_path / "q.jsonl", json.dumps(row).encode())
    assert call("data", "convert", path, tmp_path / "o.parquet")[0] == 0


def test_a_path_that_cannot_be_is_one_line(tmp_path):
    file = written(tmp_path / "file", b"")
    questions = written(tmp_path / "q.jsonl", QUESTION)
    refused("data", "validate", LONG, says="File name too long")
    refused("data", "convert", questions, file / "o.jsonl", says=f"{file}/o.jsonl")
    refused("likelihood", "prune", "--store", LONG, "--keep-steps", 1, says="File name too long")


@pytest.mark.parametrize("value", ["2024-99-99", "!!int abc", "!!float x", "1" * 5000])
def test_a_yaml_value_that_is_none_of_its_kind_is_one_line(tmp_path, value):
    path = written(tmp_path / "c.yaml", f"seed: {value}\n".encode())
    refused("config", "show", "--config", path, says=path)
    good = written(
        tmp_path / "good.yaml", b"{model: {path: m}, data: {train: t.jsonl}, retriever: {corpus: c.jsonl}}"
    )
    refused("config", "show", "--config", good, f"seed={value}", says="override 'seed=")
    run = written(tmp_path / "run" / "metrics.jsonl", STEP).parent
    refused("monitor", "replay", run, "--rules", path, says=path)


@pytest.mark.parametrize(
    "override", ["learner.lr=.inf", "seed=-1", "seed=99999999999999999999", "store.url=ftp://x"]
)
def test_numbers_and_addresses_that_nothing_can_use_are_refused(tmp_path, override):
    path = written(
        tmp_path / "c.yaml", b"{model: {path: m}, data: {train: t.jsonl}, retriever: {corpus: c.jsonl}}"
    )
    refused("config", "show", "--config", path, override, says=override.partition("=")[0])


def test_overwrite_replaces_an_index_and_nothing_else(tmp_path):
    corpus, out = index_of(tmp_path)
    kept = written(tmp_path / "home" / "letters.txt", b"precious")
    for place in (kept, kept.parent):
        refused("index", "build", "--corpus", corpus, "--out", place, "--overwrite", says=place)
    refused("index", "build", "--corpus", corpus, "--out", "/", "--overwrite", says="/")
    assert kept.read_bytes() == b"precious"
    assert call("index", "build", "--corpus", corpus, "--out", out)[0] == 0
    assert call("index", "build", "--corpus", corpus, "--out", out, "--k1", 1.5, "--overwrite")[0] == 0


def test_a_place_where_no_index_can_be_made_is_one_line(tmp_path):
    corpus, _ = index_of(tmp_path)
    for place in (corpus / "index", Path("/proc/nowhere"), Path("/tmp") / ("n" * 300)):
        refused("index", "build", "--corpus", corpus, "--out", place, says=place)
    written(tmp_path / "index.building", b"")
    refused("index", "build", "--corpus", corpus, "--out", tmp_path / "index", says="index.building")
    refused("index", "build", "--corpus", corpus, "--out", tmp_path / "i", "--k1", "inf", says="k1")


@pytest.mark.parametrize("progress", [b'{"key": {', b'{"key": 1, "unknown": 2}'])
def test_a_build_whose_progress_is_torn_starts_anew(tmp_path, progress):
    corpus, out = index_of(tmp_path)
    written(tmp_path / "index.building" / "lock", b"")
    written(tmp_path / "index.building" / "progress.json", progress)
    assert call("index", "build", "--corpus", corpus, "--out", out)[0] == 0


def test_a_folder_with_brackets_in_its_name_is_printed_as_it_is(tmp_path):
    corpus, _ = index_of(tmp_path)
    status, _, err = call("index", "build", "--corpus", corpus, "--out", tmp_path / "a[" / "bold]b")
    assert status == 0, err


def test_a_step_far_off_is_refused_wherever_it_comes_from(tmp_path):
    far = {"step": MAX_STEP + 1, "metrics": {"a": 1.0}}
    store = SQLiteStore(tmp_path / "l.db")
    with TestClient(create_app(store)) as client:
        assert client.post("/v1/runs/r/steps", json=far).status_code == 422
        assert (
            client.post("/v1/runs/r/steps", json=far | {"step": 0, "policy_version": 10**30}).status_code
            == 422
        )
        assert client.post("/v1/runs/r/steps", json=far | {"step": 0}).status_code == 200
        for path in (
            "steps?first=9999999999999999999",
            "series?last=9999999999999999999",
            f"steps/{10**30}/trajectories",
        ):
            assert client.get(f"/v1/runs/r/{path}").status_code == 422
    store.close()
    path = written(tmp_path / "m.jsonl", STEP + b'{"step": 1000000000000}\n')
    refused("monitor", "replay", path, says=f"{path}, line 2: ")
    refused("report", path, says=f"{path}, line 2: ")


def test_keeping_more_steps_than_there_are_forgets_nothing(tmp_path):
    store = SQLiteStore(tmp_path / "l.db")
    store.put_step("r", StepRecord(step=3))
    store.close()
    assert call("likelihood", "prune", "--store", tmp_path / "l.db", "--keep-steps", 10**30)[0] == 0


def test_a_database_of_something_else_is_left_alone(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as db:
        db.execute("CREATE TABLE mine (x)")
        before = db.execute("SELECT name FROM sqlite_master").fetchall()
        refused(
            "likelihood", "prune", "--store", tmp_path / "other.db", "--keep-steps", 1, says="something else"
        )
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == before


def test_a_store_without_a_path_and_a_tensorboard_folder_that_is_a_file_are_refused_at_the_start(tmp_path):
    file = written(tmp_path / "file", b"")
    refused("serve", "likelihood", "--port", 0, "--store", "sqlite:", says="sqlite:PATH")
    store = tmp_path / "l.db"
    refused("serve", "likelihood", "--port", 0, "--store", store, "--tensorboard", file, says=file, status=3)


@pytest.mark.parametrize("line", [DEEP, b'{"step": 1, "\\ud800": NaN}\n'])
def test_a_metrics_line_that_is_no_json_is_named(tmp_path, line):
    path = written(tmp_path / "m.jsonl", STEP + line + STEP)
    refused("monitor", "replay", path, says=f"{path}, line 2: ")


def test_a_metric_of_four_hundred_digits_is_read_as_no_number(tmp_path):
    line = b'{"step": 0, "grad_norm": 1, "reward/mean": 1' + b"0" * 400 + b"}\n"
    path = written(tmp_path / "m.jsonl", line)
    assert call("monitor", "replay", path)[0] == 0
    assert call("report", path)[0] == 0


def test_a_report_takes_odd_events_and_configurations(tmp_path):
    run = written(tmp_path / "run" / "metrics.jsonl", STEP).parent
    events = [
        {"step": "x", "event": "evaluation", "em": 0.5},
        {"step": 0, "event": "evaluation", "overall": "x"},
    ]
    written(run / "events.jsonl", "".join(json.dumps(e) + "\n" for e in events).encode())
    written(
        run / "config.yaml", b"a: !!set {x}\nb: " + b"9" * 100 + b"\nc: &c [*c]\n? [d]\n: 1\ne: 2024-01-01\n"
    )
    status, _, err = call("report", run)
    assert status == 0, err
    written(run / "summary.json", b"[1]")
    refused("report", run, says="summary.json")


@pytest.mark.parametrize("files", ["[]", "5", '{"x": 1}', '{"x": {}}'])
def test_a_checkpoint_whose_manifest_is_nonsense_is_torn(tmp_path, files):
    written(tmp_path / "step_000001" / "manifest.json", f'{{"files": {files}}}'.encode())
    written(tmp_path / "step_000001" / "x", b"")
    refused("export", tmp_path / "step_000001", tmp_path / "out", says="manifest.json")


def test_a_cache_that_is_a_file_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("UNSPIRAL_CACHE", str(written(tmp_path / "cache", b"")))
    status, _, err = call("model", "fetch", "smollm2-135m")
    assert (status in (2, 3), err.count("\n")) == (True, 1), err


def _command(*argv):
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_ctrl_c_while_the_program_loads_is_silent():
    process = _command("config", "schema")
    maps = Path(f"/proc/{process.pid}/maps")
    while process.poll() is None and "pydantic_core" not in maps.read_text():  # of the first imports
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (
        0,
        130,
        -signal.SIGINT,
    )  # it was quicker; it was asked; the interpreter itself was ending already
    assert err == b""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_the_greeting_and_the_first_answer_is_not_lost(tmp_path, number):
    from retriever_service.http.launch import run
    from retriever_service.settings import ServerSettings

    corpus, out = index_of(tmp_path)
    assert call("index", "build", "--corpus", corpus, "--out", out)[0] == 0
    greeted = []

    def greet(url, what):
        greeted.append(url)
        os.kill(os.getpid(), number)

    assert run(ServerSettings(index=str(out), port=0), greet) == 128 + number
    assert greeted


def test_an_index_whose_description_lists_no_files_is_damaged(tmp_path):
    corpus, out = index_of(tmp_path)
    assert call("index", "build", "--corpus", corpus, "--out", out)[0] == 0
    meta = json.loads((out / "meta.json").read_text())
    for kept in ({}, {"documents.jsonl": meta["files"]["documents.jsonl"]}):
        (out / "meta.json").write_text(json.dumps(meta | {"files": kept}))
        refused("index", "info", "--index", out, says="meta.json: damaged (it lists no documents.")
    bm25 = {name: about for name, about in meta["files"].items() if not name.startswith("bm25")}
    (out / "meta.json").write_text(json.dumps(meta | {"files": bm25}))
    refused("index", "info", "--index", out, says="lists no bm25")


def test_a_build_whose_progress_lists_no_files_starts_anew(tmp_path):
    corpus, _ = index_of(tmp_path)
    folder = tmp_path / "building"
    folder.mkdir()
    Scanner(corpus, folder, [], {"key": 1}, skip_bad=False).run()
    whole = (folder / "documents.jsonl").read_bytes()
    progress = json.loads((folder / "progress.json").read_text())
    (folder / "progress.json").write_text(json.dumps(progress | {"sizes": {}}))
    scanner = Scanner(corpus, folder, [], {"key": 1}, skip_bad=False)
    assert scanner.resumed_at == 0 and scanner.run().passages == 1
    assert (folder / "documents.jsonl").read_bytes() == whole


def test_a_weight_index_that_names_no_weights_is_refused(tmp_path):
    folder = tmp_path / "model"
    written(folder / "config.json", b'{"model_type": "qwen3"}')
    written(folder / "tokenizer.json", b"{}")
    written(folder / "model.safetensors.index.json", b'{"weight_map": {}}')
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json names no weights"):
        check_folder(folder, str(folder))


def test_a_broken_configuration_is_named_with_its_line_and_a_near_file(tmp_path):
    broken = written(tmp_path / "mine.yaml", b"run: {name: a\nmodel: [x\n")
    refused("config", "show", "--config", broken, says="mine.yaml, line 2, column 6: not YAML: expected ','")
    for text, said in (
        ("run:\n  name: a\n dir: x\n", "line 3, column 2: not YAML: the indentation fits no line above"),
        (
            "run:\n  name: a\n   dir: x\n",
            "line 3, column 7: not YAML: the line is indented deeper than line 2",
        ),
        ("run: a: b\n", "line 1, column 7: not YAML: a second `: ` in the line"),
        ("seed\nrun: {}\n", "line 2, column 4: not YAML: line 1 above has no `: `"),
        (
            "run: {a: b\n",
            "line 2, column 1: not YAML: expected ',' or '}' for the bracket of line 1, got the end",
        ),
        ("run:\n\tname: a\n", "line 2, column 1: not YAML: a tab; indent by spaces"),
        ("run: 'a\nseed: 1\n", "the quote that begins in line 1 is not closed"),
        (
            "run: {}\nseed: 1\n\nrun:\n  name: a\n",
            "line 4, column 1: not YAML: the key run stands twice, first in line 1",
        ),
        (
            "data: {}\nrun:\n  dir: x\n  name: a\n  dir: y\n",
            "line 5, column 3: not YAML: the key dir stands twice, first in line 3",
        ),
        (
            "run:\n  dir: x\n  dir: y\ndata: &held\n  more: *held\n",
            "line 3, column 3: not YAML: the key dir stands twice, first in line 2",
        ),
    ):
        refused(
            "config",
            "show",
            "--config",
            written(tmp_path / "one.yaml", text.encode()),
            says=f"one.yaml, {said}" if said.startswith("line") else said,
        )
    refused("config", "show", "--config", tmp_path / "mien.yaml", says=f"did you mean {broken}?")
    written(
        tmp_path / "text.yaml", b"run: first\nmodel: {path: m}\ndata: {train: t}\nretriever: {corpus: c}\n"
    )
    said = "run: expected a section, such as {name: ...} (got 'first')"
    refused("config", "show", "--config", tmp_path / "text.yaml", says=said)


def test_bytes_that_are_no_text_are_told_from_a_table(tmp_path):
    noise = written(tmp_path / "q.parquet", bytes(range(256)) * 12)
    refused("data", "validate", noise, says="q.parquet: binary, and neither Parquet (it begins with PAR1)")
