"""A signal ends the work cleanly: children are gone, temporary folders removed, the exit status says which
signal."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from services.common.errors import UnspiralError, UserError
from services.common.processes import signals
from trainer.lab import show

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)",
]


def test_a_signal_cancels_the_task_and_a_second_does_not_cut_its_clean_stop_short():
    said, cleaned = [], []

    async def work():
        async with signals.cancelled(said.append):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(30)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.05)
                cleaned.append(True)

    with pytest.raises(signals.Stopped, match="stopped by SIGTERM") as e:
        asyncio.run(work())
    assert (e.value.exit_code, cleaned, said) == (143, [True], ["SIGTERM: finishing up"])


def test_children_are_ended_on_sigterm_and_killed_where_they_do_not_listen(monkeypatch):
    monkeypatch.setattr(show, "ARM_END_SECONDS", 0.5)
    processes = {}
    with pytest.raises(signals.Stopped), signals.raised(), show.ended(processes):
        processes["stubborn"] = subprocess.Popen(STUBBORN, stdout=subprocess.PIPE)
        processes["stubborn"].stdout.readline()
        processes["other"] = subprocess.Popen(SLEEP)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()  # both are up
        time.sleep(30)
    assert processes["stubborn"].returncode == -signal.SIGKILL
    assert processes["other"].returncode == -signal.SIGTERM
    processes["stubborn"].stdout.close()


def test_an_arm_that_ends_badly_is_named_while_the_other_still_runs(tmp_path):
    class Run:
        name = "collapse-0-grpo"

    class Arm:
        run = Run

    bad = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    bad.wait(60)
    other = subprocess.Popen(SLEEP)
    processes = {"llds": other, "grpo": bad}
    with (
        pytest.raises(UnspiralError, match=r"^grpo: exit status 3; see .*collapse-0-grpo\.log$"),
        show.ended(processes),
    ):
        show.running(processes, tmp_path, {"grpo": Arm, "llds": Arm})
    assert other.returncode == -signal.SIGTERM


def test_a_demo_that_is_still_running_keeps_its_folder(tmp_path):
    raw = {
        "run": {"dir": str(tmp_path), "name": "demo-0"},
        "model": {"path": "m"},
        "data": {"train": "t"},
        "retriever": {"corpus": "c"},
    }
    folder = tmp_path / "demo-0"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
    with open(folder / ".lock", "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="in use by another running process"):
            show.fresh_config(raw)
        assert (folder / "metrics.jsonl").exists()
    for _ in range(2):  # the second time there is none to be moved
        show.fresh_config(raw)
        assert not folder.exists()
        assert (tmp_path / "demo-0.before" / "metrics.jsonl").read_text() == "{}\n", (
            "what was seen can be looked at again"
        )
