"""The commands, run as a user runs them."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from retriever_service.__main__ import main
from retriever_service.errors import EnvironmentLacks
from retriever_service.launch import serve_in_thread
from retriever_service.settings import ServerSettings
from tests.retriever_fixtures import CORPUS, small_index  # noqa: F401

ROOT = Path(__file__).parents[1]


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command line in this process: (exit status, standard output, standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["retriever", *map(str, words)])
        with pytest.raises(SystemExit) as done:
            main()
        return done.value.code, *capsys.readouterr()

    return run


def test_build_info_and_search(tmp_path, command):
    status, out, _ = command("index", "build", "--corpus", CORPUS, "--out", tmp_path / "i")
    assert status == 0 and "186 passages, bm25" in out.replace("\n", "")
    info = json.loads(command("index", "info", "--index", tmp_path / "i")[1])
    assert (info["passages"], info["backend"], info["settings"]["k1"]) == (186, "bm25", 0.9)
    assert command("index", "search", "--index", tmp_path / "i", "Mina Frost", "--topk", 1)[1].startswith(
        '1. "Mina Frost"  (id d59, score '
    )
    assert command("index", "search", "--index", tmp_path / "i", "zzzz")[1] == "no passage matches\n"


def test_mistakes_are_one_line_and_exit_status_2(tmp_path, small_index, command):  # noqa: F811
    (tmp_path / "bad.jsonl").write_text("{\n")
    for words, text in (
        (("index", "build", "--corpus", tmp_path / "bad.jsonl", "--out", tmp_path / "i"), "bad.jsonl:1: not JSON"),
        (("index", "info", "--index", tmp_path / "none"), "no such folder"),
        (("serve",), "--index is missing"),
        (("serve", "--index", small_index, "--retriever_name", "e5"), "--retriever_name e5"),
        (("serve", "--index", small_index, "--faiss_gpu"), "--faiss_gpu"),
        (("serve", "--index", small_index, "--corpus_path", tmp_path / "bad.jsonl"), "another corpus"),
    ):
        status, _, error = command(*words)
        assert status == 2 and text in error and error.count("\n") == 1 and error.startswith("error: ")


def test_skipped_lines_are_counted(tmp_path, command):
    (tmp_path / "c.jsonl").write_text('{"id": "0", "contents": "a"}\nbad\nworse\n')
    status, _, error = command("index", "build", "--corpus", tmp_path / "c.jsonl", "--out", tmp_path / "i", "--skip-bad")
    assert status == 0 and "2 malformed lines were left out" in error and "c.jsonl:2:" in error.replace("\n", "")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_serve_takes_upstreams_flags_and_stops_cleanly(small_index, number, status):  # noqa: F811
    words = [
        "serve",
        "--index_path",
        small_index,
        "--corpus_path",
        CORPUS,
        "--topk",
        2,
        "--retriever_name",
        "bm25",
        "--port",
        0,
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "retriever_service", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            url = re.search(r"http://\S+:\d+", process.stdout.readline()).group()
            assert httpx.get(f"{url}/healthz", trust_env=False, timeout=20).status_code == 200
            while httpx.get(f"{url}/readyz", trust_env=False).status_code != 200:
                time.sleep(0.1)
            assert len(httpx.post(f"{url}/retrieve", json={"queries": ["river"]}, trust_env=False).json()["result"][0]) == 2
            process.send_signal(number)
            assert process.wait(20) == status and "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_a_port_in_use_is_one_line_and_exit_status_3(small_index, command):  # noqa: F811
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentLacks, match=f"port {port} on 127.0.0.1 is in use") as error:
            serve_in_thread(ServerSettings(index=str(small_index), port=port))
        assert error.value.exit_code == 3
        status, _, text = command("serve", "--index", small_index, "--port", port)
        assert status == 3 and text.count("\n") == 1


def test_the_retriever_loads_neither_torch_nor_ray_nor_anything_of_the_trainer(small_index):  # noqa: F811
    program = (
        "import sys; from retriever_service.launch import serve_in_thread; from retriever_service.settings import ServerSettings\n"
        "import retriever_service.client, retriever_service.cli\n"
        "serve_in_thread(ServerSettings(index=sys.argv[1], port=0)).stop()\n"
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers', 'trainer', 'services', 'faiss') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(small_index)], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.stdout == "[]\n", done.stderr
    client = (
        "import sys, retriever_service.client; print([m for m in ('numba', 'fastapi', 'bm25s', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", client], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr
