"""Another index in the place of the old one, while requests come: none of them fails."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from places import ROOT

from retriever_service.errors import IndexInvalid
from retriever_service.http.launch import serve_in_thread
from retriever_service.indexing.build import build_index
from retriever_service.indexing.changes import add_to_index
from retriever_service.indexing.merge import merge_index
from retriever_service.search.backends import check_settings
from retriever_service.settings import ServerSettings
from tests.retriever.retriever_fixtures import CORPUS
from tests.retriever.retriever_loads import SECONDS, Served, load_on, wait_for

LINES = CORPUS.read_text("utf-8").splitlines(keepends=True)
QUERY = "Mina Frost"


def build(folder: Path, name: str, before: str, **options) -> Path:
    """An index whose ids begin with `before`."""
    rows = [json.loads(line) for line in LINES]
    texts = [json.dumps({"id": before + row["id"], "contents": row["contents"]}) + "\n" for row in rows]
    (folder / f"{name}.jsonl").write_text("".join(texts), "utf-8")
    build_index(folder / f"{name}.jsonl", folder / "place", **options)
    return folder / "place"


def found(url: str) -> str:
    answer = httpx.post(f"{url}/retrieve", json={"queries": [QUERY]}, trust_env=False, timeout=60)
    return answer.json()["result"][0][0]["id"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_signal_opens_the_new_index_and_no_request_fails(tmp_path, workers):
    place = build(tmp_path, "old", "old ")
    with Served(place, "--workers", workers) as server, load_on(server.ready().url, [QUERY]) as load:
        load.reaches(40)
        build(tmp_path, "new", "new ", overwrite=True)
        load.reaches(20)
        assert set(load.answers) == {"old d59"}
        server.process.send_signal(signal.SIGUSR1)
        wait_for(lambda: len(server.lines) >= workers, "line about the new index")
        assert all("is opened anew: 186 passages" in line for line in server.lines)
        switched = len(load.answers) + 4  # of four clients, each may have one answer on its way
        load.reaches(40)
        assert load.failures == [] and set(load.answers[switched:]) == {"new d59"}
        # A new index that is damaged leaves the one before where it is.
        (place / "meta.json").write_text("{")
        server.process.send_signal(signal.SIGUSR1)
        wait_for(lambda: len(server.lines) >= 2 * workers, "line about the damaged index")
        assert all("the one before stays" in line and "damaged" in line for line in server.lines[workers:])
        load.reaches(20)
        assert load.failures == [] and load.answers[-1] == "new d59"
        page = httpx.get(f"{server.url}/metrics", trust_env=False, timeout=SECONDS).text
        assert f'retriever_reloads_total{{result="done"}} {float(workers)}' in page
        assert f'retriever_reloads_total{{result="failed"}} {float(workers)}' in page
        server.end()
        assert server.process.returncode == 128 + signal.SIGTERM


def test_a_server_that_watches_its_place_sees_additions_merges_and_other_indexes(tmp_path):
    place = build(tmp_path, "old", "old ", postings="packed")
    settings = ServerSettings(index=str(place), port=0, reload_seconds=0.05, request_timeout_seconds=5.0)
    with serve_in_thread(settings) as server, load_on(server.url, [QUERY], clients=2) as load:

        def passages() -> int:
            return httpx.get(f"{server.url}/readyz", trust_env=False, timeout=SECONDS).json()["passages"]

        load.reaches(20)
        (tmp_path / "more.jsonl").write_text('{"id": "added", "contents": "Mina Frost Mina Frost"}\n')
        add_to_index(place, tmp_path / "more.jsonl")
        wait_for(lambda: passages() == 187, "index with the addition")
        assert found(server.url) == "added"
        before = httpx.get(f"{server.url}/shard", trust_env=False, timeout=SECONDS).json()["version"]
        merge_index(place)
        wait_for(
            lambda: (
                httpx.get(f"{server.url}/shard", trust_env=False, timeout=SECONDS).json()["version"] != before
            ),
            "index that is merged",
        )
        assert found(server.url) == "added"
        build(tmp_path, "new", "new ", overwrite=True)
        wait_for(lambda: passages() == 186, "index of another corpus")
        assert found(server.url) == "new d59" and load.failures == []


def test_the_old_index_is_given_back(tmp_path):
    place = build(tmp_path, "old", "old ")
    settings = ServerSettings(index=str(place), port=0, reload_seconds=0.05, request_timeout_seconds=0.5)

    def open_files() -> set[tuple[int, int]]:
        text = (line.split() for line in Path(f"/proc/{os.getpid()}/maps").read_text().splitlines())
        return {
            words[4] for words in text if words[-1].endswith("documents.jsonl") or "(deleted)" in words[-1]
        }

    with serve_in_thread(settings) as server:
        assert found(server.url) == "old d59"
        old = str((place / "documents.jsonl").stat().st_ino)
        assert old in open_files()
        build(tmp_path, "new", "new ", overwrite=True)
        wait_for(lambda: found(server.url) == "new d59", "answer of the new index")
        wait_for(lambda: old not in open_files(), "end of the old one")


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_the_index_as_it_is_and_starts_again(tmp_path):
    """kill -9 of a worker (its place is taken) and of the whole server, in the middle of requests."""
    place = build(tmp_path, "old", "old ")
    with Served(place, "--workers", 2) as server, load_on(server.ready().url, [QUERY], clients=2) as load:
        load.reaches(20)
        children = psutil.Process(server.process.pid).children(recursive=True)
        worker = max(children, key=lambda child: child.num_threads())
        worker.kill()
        load.reaches(20)
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.end(signal.SIGKILL)
        assert psutil.wait_procs(children, 60)[1] == []  # the workers end with it, and leave the port
    with Served(place, port=server.port) as again:
        assert found(again.ready().url) == "old d59"


def test_a_reload_that_failed_is_tried_again_and_named_until_it_is_done(tmp_path, caplog):
    """A new index that is copied file by file: its description lies there before the rest."""
    place = tmp_path / "link"
    place.symlink_to(build(tmp_path, "old", "old "))
    (tmp_path / "aside").mkdir()
    new = build(tmp_path / "aside", "new", "new ")
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    shutil.copy(new / "meta.json", incoming)
    caplog.set_level("ERROR", "retriever_service")

    def told() -> list[str]:
        return [record.message for record in caplog.records if "is not opened anew" in record.message]

    def failing(url: str) -> float:
        page = httpx.get(f"{url}/metrics", trust_env=False, timeout=SECONDS).text
        return float(re.search(r"^retriever_reload_failing (\S+)$", page, re.MULTILINE)[1])

    with serve_in_thread(ServerSettings(index=str(place), port=0, reload_seconds=0.05)) as server:
        with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
            assert "reload_failure" not in http.get("/readyz").json() and failing(server.url) == 0.0
            (tmp_path / "next").symlink_to(incoming)
            (tmp_path / "next").replace(place)
            wait_for(lambda: len(told()) >= 3, "third failure")
            for path in ("/readyz", "/health"):
                answer = http.get(path)
                assert answer.status_code == 200 and str(place) in answer.json()["reload_failure"]
            assert failing(server.url) == 1.0 and found(server.url) == "old d59"
            assert all("missing" in line and "the one before stays" in line for line in told())
            rest = shutil.ignore_patterns("meta.json")
            shutil.copytree(new, incoming, ignore=rest, dirs_exist_ok=True)
            wait_for(lambda: found(server.url) == "new d59", "answer of the new index")
            assert "reload_failure" not in http.get("/readyz").json() and failing(server.url) == 0.0
            done = len(told())
            page = http.get("/metrics").text
            assert f'retriever_reloads_total{{result="failed"}} {float(done)}' in page
            assert 'retriever_reloads_total{result="done"} 1.0' in page


@pytest.mark.parametrize(
    "words", [("retriever_service", "serve"), ("trainer", "serve", "retriever")], ids=lambda words: words[0]
)
def test_a_signal_to_reload_ends_no_server_that_only_begins_to_import(tmp_path, words):
    (tmp_path / "typer.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\nprint('goes on')\nraise SystemExit(7)\n"
    )
    begun = subprocess.run(
        [sys.executable, "-m", *words, "--index", "i"], capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )  # fmt: skip
    assert (begun.returncode, begun.stdout) == (7, "goes on\n"), begun.stderr


@pytest.mark.parametrize("word", ["--ignore-signal=USR1", "--block-signal=USR1"])
def test_who_starts_a_server_can_keep_it_from_a_signal_while_python_itself_starts(tmp_path, word):
    """`sitecustomize` is the first code that Python runs; ours has not begun."""
    sends = "import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\n"
    (tmp_path / "sitecustomize.py").write_text(sends)
    begun = subprocess.run(
        ["env", word, sys.executable, "-m", "retriever_service", "serve", "--index", tmp_path / "nowhere"],
        capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )  # fmt: skip
    assert begun.returncode == 2 and f"{tmp_path}/nowhere" in begun.stderr, begun


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_signal_to_reload_ends_no_process_whenever_it_comes(tmp_path, workers):
    """From the first line of the server on, to all of its processes, and while it stops."""
    place = build(tmp_path, "old", "old ")

    def ask_all() -> set[int]:
        """Send the signal to the server and what it has started. Returns the workers."""
        spawned = set()
        for child in psutil.Process(server.process.pid).children():
            if "spawn_main" in " ".join(child.cmdline()):
                spawned.add(child.pid)
                child.send_signal(signal.SIGUSR1)
        server.process.send_signal(signal.SIGUSR1)
        return spawned

    with Served(place, "--workers", workers) as server:
        seen = set()
        ready = threading.Thread(target=server.ready)
        ready.start()
        while ready.is_alive():
            seen |= ask_all()
            ready.join(0.02)
        asked = len(server.lines)
        seen |= ask_all()
        wait_for(lambda: len(server.lines) > asked, "index that is opened anew")
        assert len(seen) == (workers if workers > 1 else 0)  # none was replaced
        assert found(server.url) == "old d59"
        server.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + 60
        while server.process.poll() is None:
            assert time.monotonic() < until
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                ask_all()
        assert server.process.returncode == 128 + signal.SIGTERM
    assert all("is opened anew" in line for line in server.lines), server.lines


def test_a_server_beside_a_change_that_is_killed_keeps_the_old_index_until_the_change_is_done(tmp_path):
    """A merge that is killed between its two renames: the index is away."""
    place = build(tmp_path, "old", "old ", postings="packed")
    (tmp_path / "more.jsonl").write_text('{"id": "added", "contents": "Mina Frost Mina Frost"}\n')
    add_to_index(place, tmp_path / "more.jsonl")
    work = tmp_path / "place.building"
    with serve_in_thread(ServerSettings(index=str(place), port=0, reload_seconds=0.05)) as server:
        with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
            version = http.get("/shard").json()["version"]
            work.mkdir()
            (work / "lock").touch()
            place.rename(work / "replaced")
            with pytest.raises(IndexInvalid, match="was killed; give that command again"):
                check_settings(ServerSettings(index=str(place)))
            with load_on(server.url, [QUERY], clients=2) as load:
                load.reaches(20)
                assert set(load.answers) == {"added"} and "reload_failure" not in http.get("/readyz").json()
                merge_index(place)
                wait_for(lambda: http.get("/shard").json()["version"] != version, "index that is merged")
                load.reaches(20)
            assert load.failures == [] and set(load.answers) == {"added"}
    assert not work.exists()
