"""One cause, two signals: what wrappers pass on twice is heard once. Real signals, mostly in processes of
their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from end_to_end import ENVIRONMENT
from places import ROOT

from services.common.processes import signals


def alone(script):
    return subprocess.run(
        [sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )


def twice(number=signal.SIGTERM):
    for _ in range(2):
        os.kill(os.getpid(), number)


@pytest.fixture
def clock(monkeypatch):
    """The time at which signals arrive: it stands still but where a test moves it on."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_signal_within_a_second_of_the_last_one_is_that_one(clock):
    heard = []
    with signals.listening(heard.append):
        twice()
        clock.now += 0.9
        os.kill(os.getpid(), signal.SIGINT)  # a closed terminal and a wrapper send different ones
        clock.now += 0.2
        twice(signal.SIGINT)
    assert heard == [signal.SIGTERM, signal.SIGINT]


def test_the_time_at_which_a_signal_arrives_counts_and_not_when_a_busy_loop_hears_of_it(clock):
    heard = []

    async def busy():
        with signals.listening_in_loop(heard.append):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            clock.now += 2.0  # as where a batch is prepared
            await asyncio.sleep(0.05)

    asyncio.run(busy())
    assert heard == [signal.SIGTERM]


SCRIPTS = {
    "raised": """
with signals.raised():
    os.kill(os.getpid(), {number})
""",
    "cancelled": """
async def work():
    async with signals.cancelled(print):
        os.kill(os.getpid(), {number})
        await asyncio.sleep(30)
asyncio.run(work())
""",
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("kind", SCRIPTS)
def test_the_repetition_does_not_reach_the_handlers_of_before(kind, number):
    """As when an evaluation or a warm start has stopped and removes its files: the default would end the
    process there. What the suite was started to ignore (`nohup`, `&` in a script) is put back first."""
    body = "".join(f"    {line}\n" for line in SCRIPTS[kind].format(number=int(number)).splitlines())
    done = alone(f"""
import asyncio, os, signal, sys, time
from services.common.processes import signals
signal.signal({int(number)}, signal.default_int_handler if {int(number)} == signal.SIGINT else signal.SIG_DFL)
try:
{body}
except signals.Stopped as stopped:
    os.kill(os.getpid(), {int(number)})
    print("cleaned up", flush=True)
    signals.REPEAT_SECONDS = 0.0
    if stopped.exit_code != 128 + {int(number)}:
        sys.exit(1)
os.kill(os.getpid(), {int(number)})
time.sleep(30)
""")
    assert "cleaned up" in done.stdout, done
    assert done.returncode == -number, done  # and a later one does what it did before


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_service_answers_what_is_in_flight_though_the_signal_comes_twice(number, code):
    done = alone(f"""
import asyncio, os, signal, sys, threading, time, urllib.request
from fastapi import FastAPI
from services.common.http.serving import bind, run_until_signal, url_of
from services.common.processes import signals
signals.REPEAT_SECONDS = 60.0  # longer than a busy machine takes between the two

def assembled(parts):
    app = FastAPI()
    @app.get("/slow")
    async def slow():
        for _ in range(2):
            os.kill(os.getpid(), signal.{number})
            await asyncio.sleep(0.3)
        return "whole"
    return app, bind("127.0.0.1", 0, "test")

answers, threads = [], []
def ask(url):
    answers.append(urllib.request.urlopen(url + "/slow", timeout=60).read())

def announce(sock):
    threads.append(threading.Thread(target=ask, args=(url_of("127.0.0.1", sock),)))
    threads[0].start()

code = run_until_signal(assembled, announce)
threads[0].join(60)
print(answers, flush=True)
sys.exit(code)
""")
    assert done.returncode == code and "whole" in done.stdout, done


def test_only_a_signal_that_ends_a_command_makes_a_library_late(monkeypatch):
    """The user's code may use others, which neither end the run nor hide the one that does."""
    monkeypatch.setattr(signals, "OVERDUE_SECONDS", 0.0)
    heard, told = [], threading.Event()

    def overdue(number):
        heard.append(number)
        told.set()

    before = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    try:
        with signals.cut_short(overdue):
            os.kill(os.getpid(), signal.SIGUSR2)
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            assert told.wait(60)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert heard == [signal.SIGTERM]


def test_handlers_are_installed_in_one_file():
    own = re.compile(r"signal\.signal\(|add_signal_handler|sigaction|set_wakeup_fd")
    found = [
        str(path.relative_to(ROOT))
        for room in ("trainer", "services", "retriever_service")
        for path in (ROOT / room).rglob("*.py")
        if own.search(path.read_text(encoding="utf-8"))
    ]
    assert found == ["services/common/processes/signals.py"]


HELD = """
import asyncio, os, signal, subprocess, sys
from services.common.processes import signals

def send():
    os.kill(os.getpid(), signal.SIGUSR1)

async def work():
    heard = []
    async def next_one(count):
        async with asyncio.timeout(60):
            while len(heard) < count:
                await asyncio.sleep(0)
    with signals.listening_in_loop(heard.append, (signal.SIGUSR1,), each=True):
        await next_one(1)  # what came before
        send()
        await next_one(2)
    send()
    with signals.listening_in_loop(heard.append, (signal.SIGUSR1,), each=True):
        await next_one(3)

if sys.argv[1:] == ["child"]:
    send()
    signals.hold(signal.SIGUSR1)  # it was blocked from the birth of the process on, and comes now
else:
    signals.hold(signal.SIGUSR1)
    send()
    with signals.kept_from_children(signal.SIGUSR1):
        child = subprocess.Popen([sys.executable, sys.argv[0], "child"])
    if child.wait(60):
        sys.exit(f"child: {child.returncode}")
asyncio.run(work())
send()
print("alive", flush=True)
import atexit
atexit.register(send)
"""


def test_a_signal_that_is_held_ends_no_process_and_reaches_who_listens_next(tmp_path):
    script = tmp_path / "held.py"
    script.write_text(HELD)
    done = subprocess.run(
        [sys.executable, script], timeout=120, capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\nalive\n", "")
