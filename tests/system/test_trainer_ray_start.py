"""A run's start: joining a cluster, or starting a local Ray, and signals meanwhile."""

import asyncio
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from end_to_end import ENVIRONMENT

from services.common.errors import EnvironmentLacks
from services.common.processes import host_limits, signals
from services.common.processes.alive import is_alive
from services.common.processes.host_limits import ThreadLimit
from services.common.processes.signals import listening
from trainer.session import waits
from trainer.session.on_ray import start as ray_start
from trainer.session.stopping import StopSignals

IN_C = """
import ctypes
from services import local_ray
from services.common.processes import signals
from trainer.session.on_ray import start as ray_start

def start(**options):
    local_ray._WAS_SET[local_ray.OWNER_VARIABLE] = None
    ctypes.CDLL(None).system(b"echo $$; kill -TERM $PPID; sleep 600")

signals.OVERDUE_SECONDS = 0.2
ray_start.start_local_ray = start
ray_start.connect_ray(lambda text: None)
"""


def test_a_signal_ends_a_ray_whose_start_does_not_come_back_to_python():
    environment = {k: v for k, v in ENVIRONMENT.items() if k != "RAY_ADDRESS"}
    ended = subprocess.run(
        [sys.executable, "-c", IN_C], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 128 + signal.SIGTERM
    assert ended.stderr.splitlines()[-1] == "unspiral: SIGTERM: Ray did not leave its start; ended with it"
    assert not psutil.pid_exists(int(ended.stdout)) or not is_alive(psutil.Process(int(ended.stdout)))


def test_a_ray_that_starts_slowly_is_named_while_it_is_waited_for(monkeypatch):
    named = threading.Event()
    said = []

    def say(text):
        said.append(text)
        if text.startswith("waiting since "):
            named.set()

    monkeypatch.setattr(waits, "SAY_SECONDS", 0.05)
    monkeypatch.setattr(ray_start, "start_local_ray", lambda **options: named.wait(30))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray_start.connect_ray(say)
    assert named.is_set() and "): Ray to start" in said[1]


def test_a_cluster_that_cannot_be_joined_is_one_line_and_signal_handlers_stay(monkeypatch):
    def refuse(**kwargs):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise ConnectionError("ray client\nconnection timeout")

    monkeypatch.setattr(ray_start.ray, "init", refuse)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(EnvironmentLacks) as e:
        ray_start.connect_ray(lambda text: None)
    assert (
        str(e.value) == "RAY_ADDRESS=10.0.0.9:6379: cannot join that cluster: ray client connection timeout"
    )
    assert e.value.exit_code == 3
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_local_ray_that_is_not_up_in_time_is_one_line_that_says_what_helps(monkeypatch):
    def late(**kwargs):
        raise Exception(
            "The current node timed out during startup. This could happen because\n"
            "the raylet failed to startup."
        )

    monkeypatch.setattr(ray_start.ray, "init", late)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(
        EnvironmentLacks,
        match=r"^a local Ray did not start \(on a busy machine: .*timed out during startup",
    ) as e:
        ray_start.connect_ray(lambda text: None)
    assert e.value.exit_code == 3 and "\n" not in str(e.value)


def test_the_advice_for_a_late_ray_is_not_what_was_done_already(monkeypatch):
    def late(**kwargs):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray_start.ray, "init", late)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_raylet_start_wait_time_s", raising=False)
    with pytest.raises(EnvironmentLacks, match="set RAY_raylet_start_wait_time_s=180"):
        ray_start.connect_ray(lambda text: None)
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "180")
    with pytest.raises(EnvironmentLacks, match=r"has less to do\): The current node"):
        ray_start.connect_ray(lambda text: None)


def test_a_long_temporary_folder_leaves_the_sockets_of_a_local_ray_their_room(monkeypatch, tmp_path):
    """Batch systems give each job one."""
    long = tmp_path / ("x" * 60)
    long.mkdir()
    given = {}
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(ray_start.ray, "init", given.update)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    ray_start.connect_ray(lambda text: None)
    ray_start.leave_ray()
    folder = Path(given["_temp_dir"])
    assert len(str(folder)) + 64 <= 107 and folder.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("own_handler", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_ray_at_once(monkeypatch, number, own_handler):
    def never(**kwargs):
        if own_handler:  # as Ray's for SIGTERM
            signal.signal(number, lambda number, frame: sys.exit(number))
        while True:  # as Ray does: whatever fails inside is tried again
            try:
                signal.raise_signal(number)
                time.sleep(0.01)
            except Exception:
                pass

    monkeypatch.setattr(ray_start.ray, "init", never)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    async def run():
        with StopSignals(lambda text: None):
            ray_start.connect_ray(lambda text: None)

    with pytest.raises(signals.Stopped) as e:
        asyncio.run(run())
    assert e.value.exit_code == 128 + number


LOCKED_IN_C = """
import ctypes
from services.common.processes import signals
from trainer.session.on_ray import start as ray_start

def start(**options):
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)

signals.OVERDUE_SECONDS = 0.2
ray_start.RAY_SECONDS = 0.2
ray_start.start_local_ray = start
ray_start.connect_ray(lambda text: None)
"""
LATE = r"a local Ray did not start \(.*\): not up within 0\.2 s"


def test_a_local_ray_that_never_comes_up_ends_with_one_line_in_time(monkeypatch):
    monkeypatch.setattr(ray_start, "RAY_SECONDS", 0.2)
    monkeypatch.setattr(ray_start, "start_local_ray", lambda **options: threading.Event().wait(60))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv(ray_start.START_SECONDS, raising=False)
    # Any other handler comes back behind one that does not hear the repetition of a signal.
    with listening(lambda number: None):
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(EnvironmentLacks) as e:
            ray_start.connect_ray(lambda text: None)
        assert signal.getsignal(signal.SIGINT) is before
    assert re.fullmatch(LATE, str(e.value)) and e.value.exit_code == 3


def test_a_cluster_that_does_not_answer_ends_with_one_line_in_time(monkeypatch):
    monkeypatch.setattr(ray_start, "RAY_SECONDS", 0.2)
    monkeypatch.setattr(ray_start.ray, "init", lambda **options: threading.Event().wait(60))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    monkeypatch.delenv(ray_start.START_SECONDS, raising=False)
    with pytest.raises(EnvironmentLacks) as e:
        ray_start.connect_ray(lambda text: None)
    assert str(e.value) == "RAY_ADDRESS=10.0.0.9:6379: cannot join that cluster: not up within 0.2 s"


def test_a_local_ray_that_is_stuck_in_c_ends_in_time_too():
    environment = {k: v for k, v in ENVIRONMENT.items() if k not in ("RAY_ADDRESS", ray_start.START_SECONDS)}
    ended = subprocess.run(
        [sys.executable, "-c", LOCKED_IN_C], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 3
    assert re.fullmatch(f"unspiral: {LATE}", ended.stderr.splitlines()[-1])


def test_a_start_that_may_take_longer_by_rays_own_setting_is_given_twice_that_time(monkeypatch):
    monkeypatch.delenv(ray_start.START_SECONDS, raising=False)
    assert ray_start.StartLimit(None).seconds == 300
    monkeypatch.setenv(ray_start.START_SECONDS, "180")
    assert ray_start.StartLimit(None).seconds == 360
    monkeypatch.setenv(ray_start.START_SECONDS, "soon")
    assert ray_start.StartLimit(None).seconds == 300


def test_a_start_in_time_is_not_ended_afterwards(monkeypatch):
    monkeypatch.setattr(ray_start, "start_local_ray", lambda **options: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray_start.connect_ray(lambda text: None)
    assert not [t for t in threading.enumerate() if isinstance(t, threading.Timer)]


def test_a_machine_without_room_for_threads_is_told_before_and_after(monkeypatch):
    few = ThreadLimit("kernel.pid_max", 32000, 32768, "sysctl kernel.pid_max=4194304 (as root)")
    monkeypatch.setattr(host_limits, "thread_limit", lambda: few)
    monkeypatch.setattr(host_limits, "threads_of_a_run", lambda: 1274)
    monkeypatch.setattr(
        ray_start, "start_local_ray", lambda **options: (_ for _ in ()).throw(OSError("fork"))
    )
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    lack = (
        "threads: 32,000 of 32,768 in use (kernel.pid_max); a run here takes about 1,274: "
        "sysctl kernel.pid_max=4194304 (as root)"
    )
    said = []
    with pytest.raises(EnvironmentLacks) as e:
        ray_start.connect_ray(said.append)
    assert said[:2] == [f"warning: {lack}", "starting a local Ray"]
    assert str(e.value) == f"a local Ray did not start ({lack}): fork"
