"""A server that loads says every few seconds what it does, and that a signal cut its loading off."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from places import ROOT

from retriever_service.http import still_loading
from retriever_service.search import backends, index
from retriever_service.settings import ServerSettings
from tests.retriever.retriever_fixtures import small_index  # noqa: F401

SCRIPT = """
import sys, threading
from retriever_service.http import launch, still_loading
from retriever_service.search import backends, index
from retriever_service.settings import ServerSettings

still_loading.SECONDS = 0.2

class Compiles(index.Index):
    def __init__(self, *args, tell, **named):
        def told(line):
            tell(line)
            if line == index.COMPILING:
                threading.Event().wait()

        super().__init__(*args, tell=told, **named)

if sys.argv[3] == "loading":
    backends.Index = Compiles

if __name__ == "__main__":
    def say(line):
        print(line, flush=True)

    settings = ServerSettings(index=sys.argv[1], workers=int(sys.argv[2]), drain_seconds=0.1, port=0)
    sys.exit(launch.run(settings, lambda url, what: say(f"loading {what}"), lambda url: say("ready"), say))
"""


@pytest.mark.parametrize(("workers", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_each_stage_is_told_and_a_signal_while_loading_leaves_a_line(small_index, tmp_path, workers, number):
    with started(tmp_path, small_index, workers, "loading") as process:
        what = process.stdout.readline().removeprefix("loading ").rstrip()
        told = f"still loading {what}; {index.COMPILING}; "
        while not (line := process.stdout.readline()).startswith(told):
            assert line.startswith(f"still loading {what}; ")
        assert line.endswith(" s so far\n")
        process.send_signal(number)
        *rest, last = process.stdout.read().splitlines()
        assert last == f"stopped by {number.name} while the index was loading"
        assert all(line.startswith("still loading ") for line in rest)
        assert process.wait(60) == 128 + number and "Traceback" not in process.stderr.read()


def test_a_server_that_was_ready_names_the_signal_alone(small_index, tmp_path):
    with started(tmp_path, small_index, 1, "at once") as process:
        while process.stdout.readline() != "ready\n":
            pass
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "stopped by SIGINT\n" and process.wait(60) == 130


def started(folder, path, workers, kind):
    script = folder / "loads.py"  # a file, because workers import the main module anew
    script.write_text(SCRIPT)
    return Stopping(
        [sys.executable, str(script), str(path), str(workers), kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


class Stopping(subprocess.Popen):
    """Ends with its block, whatever happened there."""

    def __exit__(self, *exc_info):
        if self.poll() is None:
            self.kill()
        super().__exit__(*exc_info)


def test_nothing_is_told_once_it_is_loaded(monkeypatch):
    monkeypatch.setattr(still_loading, "SECONDS", 0.01)
    lines, looks, seen = iter(["an index", ""]), threading.Event(), []

    def loading():
        line = next(lines, None)
        if line is None:
            looks.set()
        return line or ""

    with still_loading.telling(loading, seen.append):
        assert looks.wait(60)
    assert seen == ["still loading an index; 0 s so far"]


def test_an_index_folder_tells_what_its_opening_does(small_index):
    told = []
    backends.open_index(ServerSettings(index=str(small_index)), told.append).close()
    assert told == [index.READING, index.COMPILING]
