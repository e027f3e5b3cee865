"""`unspiral serve likelihood` on a signal: what it holds is closed, and the exit status says which signal."""

import os
import signal
import subprocess
import sys

import pytest

SERVER = """
import sys
from services.likelihood import launch

open_store = launch.open_store
def noted(*args):
    store = open_store(*args)
    close = store.close
    store.close = lambda: (close(), print("closed", flush=True))
    return store
launch.open_store = noted
settings = launch.ServeSettings(store=sys.argv[1], port=0)
sys.exit(launch.serve_forever(settings, lambda line: print(line, flush=True)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_store_is_closed_and_the_status_names_the_signal(tmp_path, number):
    command = [sys.executable, "-c", SERVER, str(tmp_path / "x.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()}) as server:
        try:
            assert server.stdout.readline().startswith("likelihood service: http://127.0.0.1:")
            server.send_signal(number)
            out, _ = server.communicate(timeout=60)
        finally:
            server.kill()
    assert (out, server.returncode) == ("closed\n", 128 + number)
