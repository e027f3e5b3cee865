"""An engine whose start is given up leaves no process behind."""

import asyncio
import os
import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import psutil
import pytest
from places import ROOT

from services.rollout.engines.engine_process import Start

SLEEPER = [sys.executable, "-c", "import time; time.sleep(300)"]
SECONDS = 60.0


async def test_a_start_that_is_cancelled_goes_at_once_and_ends_what_it_starts_later_too():
    """vLLM's call goes on in its thread: the process that it starts after the signal must not stay."""
    signalled = threading.Event()
    building = threading.Event()
    started: list[subprocess.Popen[bytes]] = []

    def build(start: Start[int]) -> int:
        started.append(subprocess.Popen(SLEEPER))
        building.set()
        assert signalled.wait(SECONDS)
        started.append(subprocess.Popen(SLEEPER))
        return sum(process.wait(SECONDS) for process in started)

    task = asyncio.create_task(Start(build).result())
    assert await asyncio.to_thread(building.wait, SECONDS)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    signalled.set()
    first = await asyncio.to_thread(started[0].wait, SECONDS)
    while len(started) < 2:
        await asyncio.sleep(0.01)
    assert (first, await asyncio.to_thread(started[1].wait, SECONDS)) == (-9, -9)


async def test_a_start_that_was_given_up_before_its_process_starts_none():
    go = threading.Event()
    outcome: list[BaseException] = []
    ended = threading.Event()

    def build(start: Start[None]) -> None:
        assert go.wait(SECONDS)
        try:
            start.check()
        except CancelledError as e:
            outcome.append(e)
            raise
        finally:
            ended.set()

    task = asyncio.create_task(Start(build).result())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    assert await asyncio.to_thread(ended.wait, SECONDS)
    assert len(outcome) == 1


async def test_a_start_has_the_engine_its_processes_and_what_went_wrong():
    def build(start: Start[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        start.check()
        return subprocess.Popen(SLEEPER)

    def fail(start: Start[None]) -> None:
        raise ValueError("no such model")

    start = Start(build)
    process = await start.result()
    try:
        assert [p.pid for p in start.processes()] == [process.pid]
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(SECONDS)
        start.end()
    with pytest.raises(ValueError, match="no such model"):
        await Start(fail).result()


@pytest.mark.parametrize("method", ["Target()()", "pickle.loads(pickle.dumps(Target()))"])
def test_an_engine_whose_owner_went_while_it_started_ends_before_it_loads(method):
    """Forked, and spawned."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(SECONDS)
    assert not psutil.pid_exists(gone.pid)
    engine = (
        f"import pickle; from services.rollout.engines.engine_process import Target; {method}; "
        "print('it loads')"
    )
    environment = {**os.environ, "UNSPIRAL_ENGINE_OWNER": str(gone.pid)}
    done = subprocess.run(
        [sys.executable, "-c", engine],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
