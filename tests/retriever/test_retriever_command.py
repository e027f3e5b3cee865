"""The commands, run as a user runs them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from chromium import CHROMIUM
from places import ROOT
from pydantic import ValidationError

from retriever_service.__main__ import main
from retriever_service.http.launch import serve_in_thread
from retriever_service.settings import ServerSettings
from services.common.errors import EnvironmentLacks, UserError
from tests.retriever.retriever_fixtures import CORPUS, small_index  # noqa: F401
from tests.retriever.retriever_loads import SECONDS, line_of_ready


def wait_ready(url: str) -> None:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        try:
            if httpx.get(f"{url}/readyz", trust_env=False, timeout=SECONDS).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise TimeoutError(url)


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
    info = json.loads(command("index", "info", "--index", tmp_path / "i", "--json")[1])
    assert (info["passages"], info["backend"], info["settings"]["k1"]) == (186, "bm25", 0.9)
    assert command("index", "search", "--index", tmp_path / "i", "Mina Frost", "--topk", 1)[1].startswith(
        '1. "Mina Frost"  (id d59, score '
    )
    assert command("index", "search", "--index", tmp_path / "i", "zzzz")[1] == "no passage matches\n"


def test_no_passage_that_is_found_acts_on_the_terminal(tmp_path, command):
    corpus = tmp_path / "c.jsonl"
    contents = "Mina \x1b]0;t\x07Frost\nborn \x1b[2J in \u202e1920"
    corpus.write_text(json.dumps({"id": "d\x1b[31m", "contents": contents}) + "\n")
    command("index", "build", "--corpus", corpus, "--out", tmp_path / "i")
    out = command("index", "search", "--index", tmp_path / "i", "Mina Frost")[1]
    assert out.startswith("1. Mina \ufffd]0;t\ufffdFrost  (id d\ufffd[31m, score ")
    assert "   born \ufffd[2J in \ufffd1920\n" in out
    found = json.loads(command("index", "search", "--index", tmp_path / "i", "Mina Frost", "--json")[1])
    assert [one["contents"] for one in found] == [contents]


def test_a_corpus_whose_name_is_no_utf8_is_indexed(tmp_path, command):
    corpus = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    corpus.write_text('{"id": "0", "contents": "Mina Frost"}\n')
    assert command("index", "build", "--corpus", corpus, "--out", tmp_path / "i")[0] == 0
    info = json.loads(command("index", "info", "--index", tmp_path / "i", "--json")[1])
    assert info["corpus"].endswith("/caf\ufffd.jsonl")
    status, _, err = command("index", "build", "--corpus", corpus, "--out", tmp_path / "i")
    assert status == 0 and "already" in err.replace("\n", " ")


def test_mistakes_are_one_line_and_exit_status_2(tmp_path, small_index, command):
    (tmp_path / "bad.jsonl").write_text("{\n")
    for words, text in (
        (
            ("index", "build", "--corpus", tmp_path / "bad.jsonl", "--out", tmp_path / "i"),
            "bad.jsonl, line 1: not JSON",
        ),
        (("index", "info", "--index", tmp_path / "none"), "no such folder"),
        (("serve",), "--index is missing"),
        (("serve", "--index", small_index, "--retriever_name", "e5"), "--retriever_name e5"),
        (("serve", "--index", small_index, "--faiss_gpu"), "--faiss_gpu"),
        (("serve", "--index", small_index, "--dense-device", "cpu"), "--dense-device cpu: index"),
        (("serve", "--index", small_index, "--dense-device", "tpu"), "--dense-device tpu"),
        (("serve", "--index", small_index, "--dense-dtype", "int8"), "--dense-dtype int8: goes with"),
        (("serve", "--index", small_index, "--encoder-dtype", "int3"), "--encoder-dtype int3"),
        (("serve", "--index", small_index, "--timeout-seconds", "inf"), "--timeout-seconds inf"),
        (("serve", "--index", small_index, "--corpus_path", tmp_path / "bad.jsonl"), "another corpus"),
        (("serve", "--index", small_index, "--reranker", tmp_path / "none"), "--reranker"),
    ):
        status, _, error = command(*words)
        assert status == 2 and text in error and error.count("\n") == 1 and error.startswith("error: ")


def test_skipped_lines_are_counted(tmp_path, command):
    (tmp_path / "c.jsonl").write_text('{"id": "0", "contents": "a"}\nbad\nworse\n')
    status, _, error = command(
        "index", "build", "--corpus", tmp_path / "c.jsonl", "--out", tmp_path / "i", "--skip-bad"
    )
    assert (
        status == 0
        and "2 lines were left out, malformed or" in error
        and "c.jsonl, line 2:" in error.replace("\n", " ")
    )


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_serve_takes_upstreams_flags_and_stops_cleanly(small_index, number, status):
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
            assert httpx.get(f"{url}/healthz", trust_env=False, timeout=60).status_code == 200
            wait_ready(url)
            assert (
                len(
                    httpx.post(f"{url}/retrieve", json={"queries": ["river"]}, trust_env=False).json()[
                        "result"
                    ][0]
                )
                == 2
            )
            process.send_signal(number)
            assert process.wait(60) == status and "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_a_port_in_use_is_one_line_and_exit_status_3(small_index, command):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentLacks, match=f"port {port} of 127.0.0.1 is in use") as error:
            serve_in_thread(ServerSettings(index=str(small_index), port=port))
        assert error.value.exit_code == 3
        status, _, text = command("serve", "--index", small_index, "--port", port)
        assert status == 3 and text.count("\n") == 1


def test_the_retriever_loads_neither_torch_nor_ray_nor_anything_of_the_trainer(small_index):
    program = (
        "import sys; from retriever_service.http.launch import serve_in_thread; "
        "from retriever_service.settings import ServerSettings\n"
        "import retriever_service.client, retriever_service.cli\n"
        "serve_in_thread(ServerSettings(index=sys.argv[1], port=0)).stop()\n"
        "names = ('torch', 'ray', 'vllm', 'transformers', 'trainer', 'faiss', 'mcp')\n"
        "ours = [m for m in sys.modules if m.startswith('services.') and not "
        "m.startswith('services.common')]\n"
        "print([m for m in names if m in sys.modules] + ours)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(small_index)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.stdout == "[]\n", done.stderr
    client = (
        "import sys, retriever_service.client; print([m for m in ('numba', 'fastapi', 'bm25s', 'numpy') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", client], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.slow
def test_several_workers_share_an_index_add_up_their_metrics_and_drain(small_index):
    words = ["serve", "--index", small_index, "--port", 0, "--workers", 2, "--cache-size", 0]
    with subprocess.Popen(
        [sys.executable, "-m", "retriever_service", *map(str, words)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            url = re.search(r"http://\S+:\d+", process.stdout.readline()).group()
            wait_ready(url)
            pids = {
                c.pid for c in psutil.Process(process.pid).children() if "spawn_main" in " ".join(c.cmdline())
            }
            assert len(pids) == 2
            for _ in range(40):  # each on a connection of its own, so that both workers get some
                assert (
                    httpx.post(f"{url}/retrieve", json={"queries": ["Mina Frost"]}, trust_env=False).json()[
                        "result"
                    ][0][0]["id"]
                    == "d59"
                )
            pages = [httpx.get(f"{url}/metrics", trust_env=False).text for _ in range(4)]
            assert all(
                'retriever_requests_total{route="/retrieve",status="200"} 40.0' in page for page in pages
            )
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 143 and not any(psutil.pid_exists(pid) for pid in pids)
        finally:
            process.terminate()


def test_every_setting_of_the_server_is_a_flag(monkeypatch, command):
    pytest.importorskip("mcp")
    given = {
        "corpus": "c", "host": "0.0.0.0", "port": 1, "topk": 4, "retriever_name": "e5",
        "retriever_model": "m", "encoder_dtype": "float16", "faiss_gpu": True, "reranker": "r",
        "rerank_depth": 5, "workers": 6, "batch_size": 7, "concurrency": 8,
        "batch_wait_ms": 8.5, "max_queued": 9, "cache_size": 10,
        "request_timeout_seconds": 11.5, "max_topk": 12, "max_queries": 13, "max_passages": 17,
        "max_query_chars": 14, "max_body_bytes": 1500, "max_bodies_bytes": 1600, "max_connections": 18,
        "insecure": True, "drain_seconds": 16.5, "token": "s3cret", "index": "i",
        "dialect": "zerosearch", "mcp": True, "shard_seconds": 19.5, "partial_answers": True,
        "shard_token": "s3cret", "reload_seconds": 20.5, "dense_device": "cpu", "dense_dtype": "int8",
    }  # fmt: skip
    assert given.keys() == ServerSettings.model_fields.keys()
    underscored = {"retriever_name", "retriever_model", "faiss_gpu"}
    words = ["--timeout-seconds", "11.5", "--token-env", "TOKEN_OF_THE_TEST"]
    words += ["--shard-token-env", "TOKEN_OF_THE_TEST"]
    for name, value in given.items():
        if name not in ("request_timeout_seconds", "token", "shard_token"):
            words += [f"--{name if name in underscored else name.replace('_', '-')}"] + (
                [] if value is True else [str(value)]
            )
    received = []
    monkeypatch.setattr(
        "retriever_service.http.launch.run", lambda settings, *told: received.append(settings) or 0
    )
    monkeypatch.setenv("TOKEN_OF_THE_TEST", "s3cret")
    status, _, problem = command("serve", *words)
    assert (status, problem) == (0, "") and received == [ServerSettings(**given)]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_server_says_that_it_loads_and_only_then_that_it_is_ready(small_index, workers):
    command = [sys.executable, "-m", "retriever_service", "serve", str(small_index), "--port", "0"]
    with subprocess.Popen(
        [*command, "--workers", workers], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:  # fmt: skip
        try:
            loading, ready = process.stdout.readline(), line_of_ready(process.stdout)
            assert loading.startswith("retriever: loading ")
            url = loading.split()[-1]
            assert ready == f"retriever: ready at {url}, documentation at {url}/docs\n"
            assert httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
        finally:
            process.terminate()
    assert process.returncode == 143


def test_settings_made_in_a_program_are_refused_as_flags_are():
    with pytest.raises(UserError, match="topk 5000: at most max_topk, 1000, passages are answered"):
        ServerSettings(index="i", topk=5000)
    settings = ServerSettings(index="i", topk=5000, max_topk=5000)
    with pytest.raises(UserError, match="topk 5000: at most max_topk, 10"):
        settings.max_topk = 10
    for name, value in (
        ("drain_seconds", math.inf),
        ("request_timeout_seconds", math.inf),
        ("batch_wait_ms", math.inf),
        ("token", ""),
    ):
        with pytest.raises(ValidationError, match=name):
            ServerSettings(index="i", **{name: value})


@pytest.mark.slow
def test_what_a_killed_worker_had_queued_leaves_the_metrics_with_it(small_index, tmp_path):
    script = tmp_path / "serve_stuck.py"  # a file, because workers import the main module anew
    script.write_text(
        "import sys, time\nfrom retriever_service.search import backends, index; "
        "from retriever_service.http import launch\n"
        "from retriever_service.settings import ServerSettings\n"
        "class Stuck(index.Index):\n    quick = False\n    def search(self, queries, topk): time.sleep(60)\n"
        "    def __init__(self, *a, **k): super().__init__(*a, **k); self.quick = False\n"
        "backends.Index = Stuck\n"
        "if __name__ == '__main__':\n    settings = ServerSettings(index=sys.argv[1], port=0, workers=2)\n"
        "    sys.exit(launch.run(settings, lambda url, what: print(url, flush=True)))\n"
    )

    def workers():
        return [c for c in psutil.Process(process.pid).children() if "spawn_main" in " ".join(c.cmdline())]

    def wait_for_queued(count):
        until = time.monotonic() + 60  # new workers import and load anew, on a busy machine too
        while time.monotonic() < until:
            with contextlib.suppress(httpx.TransportError):
                if f"retriever_queued_queries {count}\n" in httpx.get(f"{url}/metrics", trust_env=False).text:
                    return True
            time.sleep(0.1)
        return False

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, script, small_index], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as process:
        try:
            url = process.stdout.readline().strip()
            wait_ready(url)
            host, port = url.removeprefix("http://").split(":")
            body = b'{"query": "Mina Frost"}'
            with socket.create_connection((host, int(port))) as asking:
                asking.sendall(
                    b"POST /retrieve HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b"
                    % (len(body), body)
                )
                assert wait_for_queued("1.0")
                for worker in workers():
                    worker.kill()
                assert wait_for_queued("0.0")
        finally:
            process.terminate()


def test_a_stop_lets_requests_in_flight_finish(small_index, tmp_path):
    program = (
        "import sys, time; from retriever_service.search import backends, index; "
        "from retriever_service.http import launch; from retriever_service.settings import ServerSettings\n"
        "class Slow(index.Index):\n    quick = False\n    def search(self, queries, topk): "
        "print('begun', flush=True); time.sleep(1.5); return super().search(queries, topk)\n"
        "    def __init__(self, *a, **k): super().__init__(*a, **k); self.quick = False\n"
        "backends.Index = Slow\n"
        "sys.exit(launch.run(ServerSettings(index=sys.argv[1], port=0), lambda url, what: print(url, "
        "flush=True)))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(small_index)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            url = process.stdout.readline().strip()
            wait_ready(url)
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(
                    httpx.post,
                    f"{url}/retrieve",
                    json={"queries": ["Mina Frost"]},
                    trust_env=False,
                    timeout=60,
                )
                assert process.stdout.readline() == "begun\n"
                process.send_signal(signal.SIGTERM)
                assert answer.result().json()["result"][0][0]["id"] == "d59"
            assert process.wait(60) == 143
        finally:
            process.kill()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium on the PATH")
def test_the_search_page_shows_passages_with_the_words_marked(small_index):
    from playwright.sync_api import sync_playwright

    with (
        serve_in_thread(ServerSettings(index=str(small_index), port=0, token="s3cret")) as running,
        sync_playwright() as play,
    ):
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(running.url)
        page.fill("#query", "Mina Frost <b>")
        page.press("#query", "Enter")
        page.wait_for_selector("#token:visible")
        assert "token is needed" in page.inner_text("#state")
        page.fill("#token", "s3cret")
        page.click("form button")
        page.wait_for_selector("li")
        assert "1. Mina Frost" in page.inner_text("li >> nth=0") and "id d59" in page.inner_text(
            "li >> nth=0"
        )
        assert page.locator("li >> nth=0 >> mark").first.inner_text() == "Mina"
        marks = (
            "([text, query]) => [...marked(text, query).querySelectorAll('mark')].map((m) => m.textContent)"
        )
        text = "Light 1 of the lighthouse, 10 lights, of 1853; Içmeler's boxes"
        assert page.evaluate(marks, [text, "light of 1"]) == ["Light", "1", "lights"]
        assert page.evaluate(marks, [text, "lights 185 box İÇMELER"]) == ["Light", "lights", "boxes"]
        assert page.evaluate(marks, [text, "of the (?"]) == []
        assert page.evaluate(marks, ["東京の灯台", "灯台"]) == ["灯台"]
        assert "passages in" in page.inner_text("#state") and not errors and "q=Mina+Frost" in page.url
        browser.close()
