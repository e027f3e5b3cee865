"""A command in whose process a user's own pool hangs ends nevertheless, with its status; atexit is kept."""

import subprocess
import sys

import pytest
from end_to_end import ENVIRONMENT
from places import ROOT

HANGS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from services.common.processes import leaving
import trainer.__main__ as command
leaving.END_SECONDS = 0.2
begun = threading.Event()
def call():
    begun.set()
    threading.Event().wait()
def run():
    ThreadPoolExecutor(1, thread_name_prefix="mine").submit(call)
    begun.wait()
    print("the last line")
    {end}
command.run = run
command.main()
"""
LINE = (
    "unspiral: 1 thread did not end within 0.2 s (mine_0, of a pool of your own code or of a library): "
    "leaving without"
)


def ended(code):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("sys.exit(2)", 2),
        ("sys.exit()", 0),
        ("sys.exit('why')", 1),
        ("raise KeyboardInterrupt", 130),
        ("raise ZeroDivisionError", 1),
    ],
)
def test_a_pool_that_hangs_does_not_keep_a_command(end, status):
    code, out, err = ended(HANGS.format(end=end))
    assert (code, out) == (status, "the last line\n") and err.rstrip().endswith(LINE)
    assert ("ZeroDivisionError" in err) == ("Zero" in end)


def test_a_command_whose_stderr_is_closed_leaves_too():
    code = "import sys\nsys.stderr = None\n" + HANGS.format(end="sys.exit(3)")
    status, out, _ = ended(code)
    assert status == 3 and out.startswith("the last line\n")


QUIET = """
import atexit, sys, threading
from services.common.processes import leaving
import trainer.__main__ as command
leaving.END_SECONDS = 0.0
fired, go = threading.Event(), threading.Event()
leave = leaving._leave
def looked(*given):
    go.wait(60)
    leave(*given)
    fired.set()
leaving._leave = looked
def last():  # Python is past the wait for threads
    go.set()
    assert fired.wait(60)
    print("uploaded")
atexit.register(last)
def run():
    threading.Thread(target=go.wait, args=(0.1,)).start()
    sys.exit(3)
command.run = run
command.main()
"""


def test_what_is_done_at_the_end_of_the_process_is_not_cut_short():
    assert ended(QUIET) == (3, "uploaded\n", "")
