"""Threads that do not hold the process up."""

import subprocess
import sys
import threading

import pytest
from places import ROOT

from services.common.processes.daemon_threads import DaemonThreads

HANGS = """
import threading
from services.common.processes.daemon_threads import DaemonThreads
begun = threading.Event()
def hang():
    begun.set()
    threading.Event().wait()
DaemonThreads(1, "t").submit(hang)
begun.wait(30)
print("over")
"""


def test_a_call_gives_its_result_or_what_it_raises():
    threads = DaemonThreads(2, "t")
    assert threads.submit(lambda: 3).result(30) == 3
    with pytest.raises(KeyError, match="mine"):
        threads.submit(lambda: {}["mine"]).result(30)


def test_as_many_threads_as_are_needed_and_no_more_than_given():
    threads, go = DaemonThreads(2, "t"), threading.Event()
    names = []

    def work(begun):
        names.append(threading.current_thread().name)
        begun.set()
        assert go.wait(30)

    begun = [threading.Event() for _ in range(3)]
    futures = [threads.submit(lambda one=one: work(one)) for one in begun]
    assert begun[0].wait(30) and begun[1].wait(30)
    assert len(names) == 2 and not begun[2].is_set(), "the third waits for a thread that is free"
    go.set()
    assert [future.result(30) for future in futures] == [None] * 3
    assert set(names) == {"t-1", "t-2"}


def test_calls_that_are_given_up_are_counted_until_they_end():
    threads, go, begun = DaemonThreads(1, "t"), threading.Event(), threading.Event()
    hangs = threads.submit(lambda: begun.set() or go.wait(30))
    waits = threads.submit(lambda: "called")
    assert begun.wait(30)
    assert threads.give_up(hangs) and threads.hanging == 1
    assert not threads.give_up(waits) and waits.cancelled() and threads.hanging == 1
    go.set()
    assert threads.submit(lambda: "free").result(30) == "free" and threads.hanging == 0
    assert threads.give_up(hangs) and threads.hanging == 0, "it ended before it was given up"


def test_a_call_that_hangs_does_not_keep_the_process():
    done = subprocess.run([sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
