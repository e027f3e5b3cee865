"""Models, questions and corpora by their names on the Hugging Face hub: from its cache, by download from a
hub on this machine, and in one line where neither is there."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from places import ROOT

from services.common.errors import UserError
from services.common.hub import HubName, hub_name

COMMIT = "a" * 40
QUESTIONS = b'{"id": "1", "question": "capital of Italy?", "golden_answers": ["Rome"], "data_source": "nq"}\n'
REFUSED = "http://127.0.0.1:9"
SILENT = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def unspiral(*arguments, home, folder, **environment):
    """`unspiral ARGUMENTS` with a cache of the hub in `home`: exit status, output, errors."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE"))}
    env |= {"PYTHONPATH": str(ROOT), "HF_HOME": str(home)} | SILENT | environment
    command = [sys.executable, "-m", "trainer", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, env=env)
    return done.returncode, done.stdout, done.stderr


def cached(home, repository, kind, files):
    """A repository as `huggingface_hub` keeps it."""
    folder = home / "hub" / f"{kind}s--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for name, body in files.items():
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_bytes(body)
    return snapshot


@pytest.mark.parametrize(
    ("given", "kind", "found"),
    [
        ("hf:org/qa", "dataset", HubName("org/qa", "dataset")),
        ("hf:org/qa/data/train.jsonl", "dataset", HubName("org/qa", "dataset", "data/train.jsonl")),
        ("org/qa", "dataset", HubName("org/qa", "dataset", bare=True)),
        ("Qwen/Qwen2.5-3B-Instruct", "model", HubName("Qwen/Qwen2.5-3B-Instruct", "model", bare=True)),
        ("here/missing", "dataset", None),  # a folder of that name is here, so it is a path
        ("there/train.jsonl", "dataset", None),
        ("models/mine", "model", None),  # a placeholder, though that folder is not here yet
        ("hf:models/mine", "model", HubName("models/mine", "model")),
        ("/abs/path", "model", None),
        ("./org/qa", "model", None),
        ("smollm2-135m", "model", None),
        ("lab:train_questions:0", "dataset", None),
        ("a/b/c", "model", None),
    ],
)
def test_what_is_a_name_on_the_hub(tmp_path, monkeypatch, given, kind, found):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert hub_name(given, kind) == found


@pytest.mark.parametrize("given", ["hf:org", "hf:org/qa/../x", "hf:", "hf:org/qa/*"])
def test_a_name_that_is_none_says_the_form(given):
    with pytest.raises(UserError, match="expected hf:ORG/NAME or hf:ORG/NAME/FILE"):
        hub_name(given, "dataset")
    with pytest.raises(UserError, match=r"expected hf:ORG/NAME$"):
        hub_name("hf:org/model/file", "model")


def test_the_command_that_fetches_it():
    assert HubName("o/m", "model").command() == "hf download o/m"
    assert HubName("o/d", "dataset", "t.jsonl").command() == "hf download o/d t.jsonl --repo-type dataset"


def test_questions_and_corpora_come_from_the_cache_offline(tmp_path):
    cached(tmp_path / "home", "org/qa", "dataset", {"train.jsonl": QUESTIONS, "README.md": b"#"})
    corpus = b'{"id": "1", "contents": "\\"Rome\\"\\nRome is a city."}\n'
    cached(tmp_path / "home", "org/wiki", "dataset", {"corpus.jsonl": corpus})
    offline = {"home": tmp_path / "home", "folder": tmp_path, "HF_HUB_OFFLINE": "1"}
    for given in ("hf:org/qa/train.jsonl", "hf:org/qa"):
        status, out, err = unspiral("data", "validate", given, **offline)
        assert status == 0 and out.split()[:2] == ["nq", "1"], err
    status, out, err = unspiral("index", "build", "--corpus", "hf:org/wiki", "--out", "index", **offline)
    assert status == 0 and "1 passage" in out, err


def test_offline_without_it_one_line_has_the_command(tmp_path):
    offline = {"home": tmp_path / "home", "folder": tmp_path, "HF_HUB_OFFLINE": "1"}
    status, _, err = unspiral("data", "validate", "hf:org/qa/train.jsonl", **offline)
    (line,) = err.splitlines()
    assert status == 3 and line.startswith(
        "unspiral: data validate hf:org/qa/train.jsonl: not here, and not in"
    )
    assert line.endswith(
        "(HF_HUB_OFFLINE is set); fetch it with: hf download org/qa train.jsonl --repo-type dataset"
    )


def test_a_hub_out_of_reach_ends_train_in_one_line_before_the_run_has_a_folder(tmp_path):
    (tmp_path / "q.jsonl").write_bytes(QUESTIONS)
    (tmp_path / "c.yaml").write_text(
        "run: {dir: runs}\nmodel: {path: org/model}\ndata: {train: q.jsonl}\nretriever: {url: 'http://127.0.0.1:9'}\n"
    )
    status, _, err = unspiral(
        "train", "--config", "c.yaml", home=tmp_path / "home", folder=tmp_path, HF_ENDPOINT=REFUSED
    )
    *said, line = err.splitlines()
    asked = "model.path org/model: no such folder; asking the Hugging Face hub for it"
    assert status == 3 and said == [asked], err
    assert line.startswith("unspiral: model.path org/model: no such folder, and cannot be downloaded from")
    assert "fetch it with: hf download org/model (" in line and not (tmp_path / "runs").exists()


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download asks for: the list of files of one data set, and the files."""

    FILES: ClassVar = {"train.jsonl": QUESTIONS, "run.py": b"raise SystemExit"}
    asked: ClassVar[list[str]] = []

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.asked.append(path)
        if path.startswith("/api/datasets/org/qa/tree/"):
            found = [
                {"type": "file", "path": n, "size": len(b), "oid": "0" * 40} for n, b in self.FILES.items()
            ]
            return self.answer(json.dumps(found).encode())
        if path.startswith("/api/datasets/org/qa"):
            siblings = [{"rfilename": name} for name in self.FILES]
            return self.answer(json.dumps({"id": "org/qa", "sha": COMMIT, "siblings": siblings}).encode())
        name = path.rpartition("/")[2]
        if path.startswith("/datasets/org/qa/resolve/") and name in self.FILES:
            return self.answer(self.FILES[name])
        if path.startswith("/api/models/org/gated"):
            return self.answer(b"{}", 403, {"X-Error-Code": "GatedRepo"})
        return self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"} if "/api/" in path else {})

    do_HEAD = do_GET

    def answer(self, body, status=200, more=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        for name, value in (more or {}).items():
            self.send_header(name, value)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        """Quiet."""


@pytest.fixture
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (("model", "fetch", "my_models/wram"), "no such folder, and the Hugging Face hub shows no model"),
        (
            ("data", "validate", "qa/tarin"),
            "no such file or folder, and the Hugging Face hub shows no data set",
        ),
    ],
)
def test_a_mistyped_path_that_could_be_a_name_is_said_to_be_neither(tmp_path, endpoint, arguments, absent):
    where = {"home": tmp_path / "home", "folder": tmp_path, "HF_ENDPOINT": endpoint}
    status, _, err = unspiral(*arguments, **where)
    asked, line = err.splitlines()
    given = arguments[-1]
    assert status == 2 and f"{given}: no such f" in asked
    assert line.endswith(f"{given}: {absent} {given} (a private one needs HF_TOKEN)"), err


def test_a_gated_model_says_what_to_do(tmp_path, endpoint):
    where = {"home": tmp_path / "home", "folder": tmp_path, "HF_ENDPOINT": endpoint}
    status, _, err = unspiral("model", "fetch", "org/gated", **where)
    assert status == 3
    assert err.splitlines()[-1].endswith(
        "org/gated on the Hugging Face hub is gated: accept its terms on the hub, then set HF_TOKEN"
    )


def test_what_is_not_in_the_cache_is_downloaded_once_and_never_code(tmp_path, endpoint):
    where = {"home": tmp_path / "home", "folder": tmp_path}
    status, out, err = unspiral("data", "validate", "hf:org/qa", **where, HF_ENDPOINT=endpoint)
    assert status == 0 and out.split()[:2] == ["nq", "1"], err
    assert not any("run.py" in path for path in Hub.asked)
    status, out, err = unspiral("data", "validate", "hf:org/qa/train.jsonl", **where, HF_ENDPOINT=REFUSED)
    assert status == 0 and out.split()[:2] == ["nq", "1"], err
