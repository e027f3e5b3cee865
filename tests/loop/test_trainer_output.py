"""A terminal that stands still or has gone does not hold up whoever prints to it."""

from __future__ import annotations

import fcntl
import io
import os
import re
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console

from services.likelihood.monitor.alarms import PHASES
from trainer.loop.run.progress import PHASE_STYLE, Progress
from trainer.session.output import NonBlockingStream, complain, non_blocking

PIPE_BYTES = 4096


@pytest.fixture
def pipe():
    """A pipe that takes 4 KiB: where to read, and a text file to write to."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    file = os.fdopen(write, "w")
    yield read, file
    for close in (lambda: os.close(read), file.close):
        try:
            close()
        except OSError:
            continue


def test_everything_is_printed_in_order_through_a_pipe_that_is_read_late(pipe):
    read, file = pipe
    stream, got = NonBlockingStream(file), []
    for i in range(2000):
        stream.write(f"line {i} \u00e9\n")
    assert not stream.drain(0.2)

    def reader():
        while len(b"".join(got).splitlines()) < 2000:
            got.append(os.read(read, 1 << 16))

    thread = threading.Thread(target=reader, daemon=True)
    thread.start()
    assert stream.drain(20)
    thread.join(60)
    assert b"".join(got).decode().splitlines() == [f"line {i} \u00e9" for i in range(2000)]


def test_what_nobody_reads_is_left_out_and_counted(pipe):
    read, file = pipe
    stream = NonBlockingStream(file, kept=2)
    stream.write("x" * PIPE_BYTES * 2)
    while not stream._waiting.empty():  # until it is in the hands of the thread, which waits
        time.sleep(0.01)
    for i in range(5):
        stream.write(f"line {i}\n")
    got = b""
    while len(got) < PIPE_BYTES * 2:
        got += os.read(read, 1 << 16)
    assert stream.drain(20)
    got += os.read(read, 1 << 16)
    assert got.decode().lstrip("x") == "(3 lines were left out: nobody read them)\nline 0\nline 1\n"


def test_a_reader_that_has_gone_is_no_error(pipe):
    read, file = pipe
    os.close(read)
    stream = NonBlockingStream(file)
    stream.write("to nobody\n")
    assert stream.drain(20)


def test_a_console_gets_its_file_back_with_all_that_was_printed():
    file = io.StringIO()
    console = Console(file=file, width=60)
    with non_blocking(console):
        console.print("inside")
        assert console.file is not file and not console.is_terminal
    console.print("after")
    assert console.file is file and file.getvalue() == "inside\nafter\n"


def test_a_last_complaint_reaches_stderr(capsys):
    complain("unspiral: x: no such file")
    assert capsys.readouterr().err == "unspiral: x: no such file\n"


def test_a_complaint_that_nobody_reads_does_not_keep_a_process_from_ending(pipe):
    _, file = pipe
    script = (
        "from trainer.session import output; output.DRAIN_SECONDS = 0.5; output.complain('x' * 100_000); "
        "raise SystemExit(7)"
    )
    assert subprocess.run([sys.executable, "-c", script], stderr=file, timeout=60).returncode == 7


def test_nor_does_one_beside_a_thread_that_stands_in_a_write(pipe):
    _, file = pipe
    script = (
        "import os, sys, threading, time; from trainer.session import output; output.DRAIN_SECONDS = 0.5\n"
        "threading.Thread(target=lambda: sys.stderr.write('y' * 100_000), daemon=True).start(); "
        "time.sleep(0.5)\n"
        "output.complain('x'); os._exit(7)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    assert (
        subprocess.run([sys.executable, "-c", script], stderr=file, timeout=60, env=environment).returncode
        == 7
    )


def test_a_console_that_is_non_blocking_already_stays_so():
    file = io.StringIO()
    console = Console(file=file, width=60)
    with non_blocking(console):
        outer = console.file
        with non_blocking(console):
            assert console.file is outer
            console.print("first")
        console.print("second")
    assert file.getvalue() == "first\nsecond\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_run_says_is_printed_as_it_is_with_its_brackets(terminal):
    said = [
        "warning: pip install '.[cpu]'",
        "rank 0 died: cannot open [/usr/lib/x.so]",
        "run folder: /runs/[red]",
    ]
    progress = Progress(3, Console(file=io.StringIO(), force_terminal=terminal, width=200))
    for text in said:
        progress.say(text)
    printed = re.sub(r"\x1b\[[0-9;]*m", "", progress.console.file.getvalue())
    assert printed.splitlines() == said


def test_each_phase_has_a_style_in_the_table_of_steps():
    assert set(PHASE_STYLE) == set(PHASES)


def test_a_log_explains_the_columns_of_its_steps_once_within_80_columns():
    file = io.StringIO()
    progress = Progress(10, Console(file=file, width=80))
    for step in (1, 2):
        progress.step({"step": step, "reward/mean": 0.5, "time/step": 1.0}, [])
    printed = file.getvalue().splitlines()
    heads = [at for at, text in enumerate(printed) if text.split()[:2] == ["step", "reward"]]
    assert heads == [2], "two lines above the only header"
    legend = " ".join(printed[:2])
    assert all(f"{name}:" in legend for name in ("wrong", "displ.", "lag", "LLDS"))
    assert max(map(len, printed[:3])) < 80
