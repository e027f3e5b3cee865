"""What a process tells of its threads and tasks when it is asked where it stands."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading

from services.common.processes import stacks
from services.common.processes.stacks import answer_stack_requests, task_stacks, thread_stacks


def test_a_process_tells_the_stacks_of_its_threads_and_tasks(monkeypatch):
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 60.0)  # on a machine with hundreds of busy threads
    answer_stack_requests()
    signal.signal(signal.SIGUSR1, lambda *_: None)  # as a service that is started in this process may
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    answer_stack_requests()
    assert len(list(stacks._answers(os.getpid()))) == 1
    held = threading.Event()

    def a_thread_that_waits():
        held.wait(60)

    threading.Thread(target=a_thread_that_waits, daemon=True).start()
    assert "a_thread_that_waits" in thread_stacks(os.getpid())
    held.set()
    assert thread_stacks(2**22 - 1) == f"there is no process {2**22 - 1}"
    other = subprocess.Popen(["sleep", "20"])
    try:
        assert (
            thread_stacks(other.pid) == f"process {other.pid} does not tell its stacks"
            and other.poll() is None
        )
    finally:
        other.kill()
        other.wait()

    async def outer():
        async def inner():
            await asyncio.sleep(20)

        task = asyncio.create_task(inner(), name="mine")
        await asyncio.sleep(0)
        text = task_stacks([task])
        task.cancel()
        return text

    text = asyncio.run(outer())
    assert text.startswith("task mine:") and ".inner\n" in text and " in sleep" in text


def test_a_stopped_process_is_named_as_such():
    script = (
        "from services.common.processes.stacks import answer_stack_requests as a; a(); "
        "print('up', flush=True); import time; time.sleep(30)"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "up\n"
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)  # it stops a moment after the signal
        assert thread_stacks(child.pid) == f"process {child.pid} does not answer (State: T (stopped))"
    finally:
        child.kill()
        child.wait()
