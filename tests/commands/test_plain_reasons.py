"""What a library or Python says of a mistake is told in words for people."""

import errno
import os
import subprocess
import sys

import httpx
import pytest
from command_line import run  # noqa: F401
from places import ROOT

from services.common.printing.messages import said_by

BASE = "{model: {path: m}, data: {train: q.jsonl}, retriever: {url: 'http://127.0.0.1:9'}}"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(BASE)
    (tmp_path / "q.jsonl").write_text('{"question": "q?", "golden_answers": ["a"]}\n')
    (tmp_path / "odd").write_bytes(b"a: \xff")
    (tmp_path / "file.txt").write_text("hi\n")
    return tmp_path


@pytest.mark.parametrize("words", [("config", "show"), ("train",), ("doctor",), ("eval",)])
def test_a_configuration_that_is_no_text(run, place, words):
    said = "odd: cannot be read (no UTF-8 text: byte 3 is none of it)"
    status, out, err = run(*words, "--config", "odd")
    assert status == 2 and said in out + err and "codec" not in out + err


def test_so_are_rules(run, place):
    (place / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert run("monitor", "replay", "metrics.jsonl", "--rules", "odd") == (
        2,
        "",
        "unspiral: --rules odd: cannot be read (no UTF-8 text: byte 3 is none of it)\n",
    )


def test_a_value_that_is_left_out(run, place):
    said = "unspiral: learner.lr: expected a number (got nothing)\n"
    assert run("config", "show", "--config", "c.yaml", "learner.lr=") == (2, "", said)


@pytest.mark.parametrize("words", [("status", "file.txt"), ("trace", "file.txt", "1")])
def test_a_file_in_place_of_a_run(run, place, words):
    status, out, err = run(*words)
    assert (status, out) == (2, "") and "has none of" not in err
    assert err.startswith(
        "unspiral: file.txt: a file, and no run's folder; `unspiral runs` lists those in runs/"
    )


def test_a_model_that_is_none_is_told_before_the_run_has_a_folder(run, place):
    (place / "m").mkdir()
    assert run("train", "--config", "c.yaml") == (
        2,
        "",
        "unspiral: model.path m: no config.json; expected a folder in Hugging Face form\n",
    )
    assert not (place / "runs").exists()


def test_a_key_that_may_change_needs_a_run_to_go_on_with(run, place):
    said = "unspiral: --allow-changed: goes with --resume latest or --resume PATH\n"
    assert run("train", "--config", "c.yaml", "--allow-changed", "learner.lr") == (2, "", said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("ask", ""),
            "ask: an empty word where a checkpoint is named; expected a checkpoint, a run or latest.",
        ),
        (("serve", "agent", " "), "serve agent: an empty word where a checkpoint is named; expected a che"),
        (
            ("ask", "--checkpoint", "x", "who?", "topk=3"),
            "ask: topk=3: no key topk; expected such as rollout.",
        ),
        (
            ("ask", "--checkpoint", "x", "who", "wrote"),
            "ask: 2 questions; quote the question: 'who wrote Hamlet",
        ),
    ],
)
def test_words_that_are_no_question(run, place, words, said):
    status, out, err = run(*words)
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith(f"unspiral: {said}"), err


@pytest.mark.parametrize("words", [("--help",), ("config", "schema"), ("--version",)], ids=" ".join)
def test_an_output_that_nobody_reads_on(words):
    """As behind `| head -1`: no word on standard error, and the status that a shell gives it."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "trainer", *words]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, cwd=ROOT, timeout=120)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (httpx.ConnectError("[Errno 111] Connection refused"), "Connection refused"),
        (httpx.ConnectError("[Errno -2] Name or service not known"), "Name or service not known"),
        (httpx.ReadTimeout("timed out"), "timed out"),
        (httpx.ReadError(""), "ReadError"),
        (OSError(errno.EPERM, "Operation not permitted"), "Operation not permitted"),
    ],
)
def test_the_words_of_an_error(error, said):
    assert said_by(error) == said
