"""The grid's processes and the states of its cells, with small scripts in place of training."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque

import pytest
from rich.console import Console

from benchmarks.collapse.planned.cells import MOST_FAILURES, Cell, cells
from benchmarks.collapse.running import grid
from benchmarks.collapse.running.grid import (
    GridProgress,
    Job,
    Runner,
    end_all,
    machine_file,
    run_grid,
    time_left,
)
from benchmarks.grids.cell_folder import tell_states
from benchmarks.grids.kept import processor
from services.common.errors import UnspiralError, UserError
from services.common.files import lock
from services.common.processes.signals import Stopped

CONSOLE = Console(quiet=True)
TRAIN = """
import json, pathlib, sys, time
run, steps, status = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
run.mkdir(parents=True, exist_ok=True)
(run / "events.jsonl").touch()
with open(run / "metrics.jsonl", "a") as f:
    for step in range(1, steps + 1):
        f.write(json.dumps({"step": step}) + chr(10))
(run / "summary.json").write_text(json.dumps({"exit": status, "steps": steps, "seconds": 1.0}))
print("ended with", status)
sys.exit(status)
"""


@pytest.fixture
def scripts(monkeypatch):
    """Exit statuses by cell name, in turn; each start of a training is noted."""
    monkeypatch.setattr(grid, "warm_job", lambda folder, seed: None)
    monkeypatch.setattr(grid, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(grid, "APART_SECONDS", 0.0)
    statuses, started = {}, []

    def command(cell):
        queue = statuses.setdefault(cell.name, [0])
        started.append(cell.name)
        return [sys.executable, "-c", TRAIN, str(cell.run), str(cell.steps), str(queue[0])]

    monkeypatch.setattr(grid, "command_of", command)
    return statuses, started


def write(cell, *, steps=0, summary=None):
    cell.run.mkdir(parents=True, exist_ok=True)
    (cell.run / "events.jsonl").touch()
    (cell.run / "metrics.jsonl").write_text("".join(f'{{"step": {i + 1}}}\n' for i in range(steps)))
    if summary is not None:
        (cell.run / "summary.json").write_text(json.dumps(summary))


# -- states


def test_the_state_of_a_cell_is_read_from_its_files(tmp_path):
    cell = Cell("grpo", 100, tmp_path, 10)
    assert (cell.state(), cell.ended) == ("-", False)
    write(cell, steps=4)
    assert cell.state() == "cut at 4"
    with lock(cell.run / ".lock"):
        assert cell.state() == "running 4"
    write(cell, steps=5, summary={"exit": 143, "steps": 5})
    assert cell.state() == "cut at 5"
    write(cell, steps=6, summary={"exit": 1, "steps": 6})
    assert cell.state() == "failed at 6"
    write(cell, steps=10, summary={"exit": 0, "steps": 10})
    assert (cell.state(), cell.ended) == ("ended", True)
    assert not Cell("grpo", 100, tmp_path, 20).ended
    for _ in range(MOST_FAILURES):
        cell.failed(1)
    write(cell, steps=6, summary={"exit": 1, "steps": 6})
    assert cell.state() == "dead at 6"


def test_a_torn_summary_or_metrics_line_is_a_cut_cell(tmp_path):
    cell = Cell("grpo", 100, tmp_path, 10)
    write(cell, steps=2)
    (cell.run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "rew')
    (cell.run / "summary.json").write_text('{"exit": 0, "st')
    assert cell.state() == "cut at 1"


def test_the_grid_keeps_the_machine_that_ran_a_cell(tmp_path, scripts):
    cell = Cell("grpo", 100, tmp_path, 2)
    assert run_grid([cell], tmp_path, 1, CONSOLE) == 0
    noted = json.loads(machine_file(cell).read_text())
    assert noted["processor"] == processor() and noted["torch"]
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: Some CPU\n\n"
        "processor\t: 1\ncpu family\t: 9\nmodel name\t: Other CPU\n"
    )
    assert processor(tmp_path / "cpuinfo") == "Some CPU (family 25, model 17)"
    assert processor(tmp_path / "missing")


def test_cells_come_arm_by_arm(tmp_path):
    assert [c.name for c in cells(tmp_path, ["b", "a"], [1, 2])] == ["b-1", "b-2", "a-1", "a-2"]


def test_a_run_folder_of_other_settings_is_refused(tmp_path):
    cell = Cell("grpo", 100, tmp_path, 10)
    text = cell.config_file().read_text()
    cell.run.mkdir(parents=True)
    (cell.run / "config.yaml").write_text(text.replace(str(tmp_path), "/elsewhere"))
    cell.config_file()  # the folder was moved
    with pytest.raises(
        UserError, match=r"holds a run with another trainer\.steps; choose another folder, or remove"
    ):
        Cell("grpo", 100, tmp_path, 20).config_file()


def test_status_lists_each_cell(tmp_path):
    console = Console(width=160, record=True, quiet=False, file=io.StringIO())
    found = cells(tmp_path, ["grpo", "llds_0.5"], [100, 101], 10)
    write(found[0], steps=10, summary={"exit": 0, "steps": 10})
    write(found[1], steps=3)
    tell_states(found, "arm", console)
    lines = console.export_text().splitlines()
    assert lines[2].split() == ["grpo", "ended", "cut", "at", "3", "1", "of", "2", "ended"]
    assert lines[3].split() == ["llds_0.5", "-", "-", "0", "of", "2", "ended"]


def test_a_status_wider_than_the_console_is_a_line_per_arm_with_the_seeds_of_each_state(tmp_path):
    console = Console(width=80, record=True, quiet=False, file=io.StringIO())  # as in a pipe
    found = cells(tmp_path, ["grpo", "llds_0.5"], list(range(100, 140)), 10)
    for cell in found[:3]:
        write(cell, steps=10, summary={"exit": 0, "steps": 10})
    write(found[5], steps=3)
    tell_states(found, "arm", console)
    assert console.export_text().splitlines() == [
        "arm       seeds of each state",
        "grpo      ended: 100-102; not begun: 103-104, 106-139; cut at 3: 105",
        "llds_0.5  not begun: 100-139",
    ]


# -- the grid


def test_all_cells_run_once_and_ended_ones_are_skipped(tmp_path, scripts):
    _, started = scripts
    found = cells(tmp_path, ["grpo", "llds_0.5"], [100, 101], 3)
    write(found[0], steps=3, summary={"exit": 0, "steps": 3})
    assert run_grid(found, tmp_path, 2, CONSOLE) == 0
    assert started == [cell.name for cell in found[1:]]
    assert all(cell.ended for cell in found)
    started.clear()
    assert run_grid(found, tmp_path, 2, CONSOLE) == 0
    assert started == []


def test_a_cell_that_fails_three_times_is_dead_and_the_others_go_on(tmp_path, scripts):
    statuses, _ = scripts
    found = cells(tmp_path, ["grpo"], [100, 101], 3)
    statuses["grpo-100"] = [1]
    assert run_grid(found, tmp_path, 1, CONSOLE) == 1
    assert [cell.state() for cell in found] == ["dead at 3", "ended"]
    assert (tmp_path / "logs/grpo-100.log").read_text().count("ended with 1") == MOST_FAILURES


def test_a_cell_that_follows_another_waits_for_it(tmp_path, scripts):
    _, started = scripts
    found = cells(tmp_path, ["matched_step", "llds_0.5"], [100], 3)
    assert run_grid(found, tmp_path, 2, CONSOLE) == 0
    assert started == ["matched_step-100", "llds_0.5-100"] and all(cell.ended for cell in found)
    ended = [(tmp_path / cell.row / "100" / "summary.json").stat().st_mtime_ns for cell in found]
    assert ended[1] < ended[0]


def test_a_cell_that_follows_one_that_died_is_refused(tmp_path, scripts):
    statuses, _ = scripts
    statuses["llds_0.5-100"] = [1]
    with pytest.raises(UserError, match=r"^matched_step-100 follows the series of llds_0\.5-100, which died"):
        run_grid(cells(tmp_path, ["matched_step", "llds_0.5"], [100], 3), tmp_path, 1, CONSOLE)


def only(name, start):
    """Runner._start, which leaves all jobs but one waiting."""

    def started(self, waiting):
        others = [job for job in waiting if job.name != name]
        mine = deque(job for job in waiting if job.name == name)
        start(self, mine)
        waiting.clear()
        waiting.extend([*mine, *others])

    return started


@pytest.mark.parametrize(("status", "starts"), [(2, 1), (137, 1), (3, grid.ENVIRONMENT_TRIES)])
def test_a_fault_of_settings_or_machine_ends_the_grid(tmp_path, scripts, monkeypatch, status, starts):
    """What the machine lacks may be there a moment later: it is tried again, and the cell has not failed."""
    statuses, _ = scripts
    monkeypatch.setattr(grid, "PAUSE_SECONDS", 0.05)
    found = cells(tmp_path, ["grpo"], [100, 101], 3)
    statuses["grpo-100"] = [status]
    monkeypatch.setattr(Runner, "_start", only("grpo-100", Runner._start))
    with pytest.raises(UnspiralError, match=rf"^grpo-100: exit status {status}: ended with {status} \(log: "):
        run_grid(found, tmp_path, 1, CONSOLE)
    assert found[0].failures() == 0 and found[1].state() == "-"
    assert (tmp_path / "logs/grpo-100.log").read_text().count("ended with") == starts


def test_two_grids_do_not_share_a_folder(tmp_path, scripts):
    with lock(tmp_path / ".lock"), pytest.raises(UserError, match="another grid runs in it"):
        run_grid(cells(tmp_path, ["grpo"], [100], 3), tmp_path, 1, CONSOLE)


def sleeper(tmp_path, name, deaf=False):
    """A job with a child, both of which write their ids to a file."""
    script = (
        "import os, pathlib, signal, subprocess, sys, time\n"
        + ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if deaf else "")
        + "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        + (
            ""
            if deaf
            else "signal.signal(signal.SIGTERM, lambda *a: (child.kill(), child.wait(), sys.exit(0)))\n"
        )
        + f"pathlib.Path({str(tmp_path / name)!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        + "time.sleep(60)\n"
    )
    return Job(name, [sys.executable, "-c", script], tmp_path / f"{name}.log")


def ids(tmp_path, name):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (tmp_path / name).exists() and len(found := (tmp_path / name).read_text().split()) == 2:
            return [int(i) for i in found]
        time.sleep(0.02)
    raise AssertionError(f"{name} did not start")


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_grid_and_leaves_no_process(tmp_path, number):
    jobs = [sleeper(tmp_path, "a"), sleeper(tmp_path, "b"), sleeper(tmp_path, "c")]
    family = []

    def interrupt():
        family.extend(ids(tmp_path, "a") + ids(tmp_path, "b"))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    with pytest.raises(Stopped, match="run the same command again") as stopped:
        with Runner(2, CONSOLE).opened() as runner:
            thread.start()
            runner.run(jobs, GridProgress([], 2, CONSOLE))
    thread.join()
    assert stopped.value.exit_code == 128 + number
    assert len(family) == 4 and all(map(gone, family))
    assert not (tmp_path / "c").exists()


def test_a_job_that_does_not_listen_is_killed_with_its_children(tmp_path):
    job = sleeper(tmp_path, "deaf", deaf=True)
    job.start()
    family = ids(tmp_path, "deaf")
    end_all([job], seconds=0.2)
    deadline = time.monotonic() + 60
    while not all(map(gone, family)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(map(gone, family))


def test_a_cell_in_use_by_another_process_waits_for_it(tmp_path, scripts):
    found = cells(tmp_path, ["grpo"], [100, 101], 3)
    write(found[0], steps=1)
    held = lock(found[0].run / ".lock")
    threading.Timer(0.5, held.close).start()
    assert run_grid(found, tmp_path, 1, CONSOLE) == 0
    assert all(cell.ended for cell in found)


def test_the_time_left_is_that_of_the_missing_steps():
    assert time_left(0, 60, 100) == "time left not known yet"
    assert time_left(10, 60, 100) == "about 0 h 10 min left"
    assert time_left(10, 60, 1_000) == "about 1 h 40 min left"


def test_the_command_goes_on_from_the_newest_checkpoint_or_begins_anew(tmp_path):
    command = grid.command_of(Cell("llds_0.5", 103, tmp_path))
    assert command[1:5] == ["-m", "trainer", "train", "--config"]
    assert command[6:] == ["--resume", "latest"]
    assert subprocess.run(["grep", "-c", "lambda: 0.5", command[5]], capture_output=True).stdout == b"1\n"


def test_a_warm_start_that_is_there_is_not_made_again(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    assert grid.warm_job(tmp_path, 100).name == "warm start 100"
    file = grid.warm_file(tmp_path, 100)
    file.parent.mkdir()
    file.write_text(json.dumps({"path": str(model), "sha256": grid._weights_sum(model)}))
    assert grid.warm_job(tmp_path, 100) is None
    (model / "model.safetensors").write_bytes(b"others")
    assert grid.warm_job(tmp_path, 100) is not None


def test_jobs_are_started_apart_from_one_another(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(grid.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Job, "start", lambda job: None)
    runner = Runner(3, CONSOLE)
    waiting = deque(Job(f"job {n}", [], tmp_path / "log") for n in range(4))
    at = []
    for tenths in range(0, 100, 5):
        now[0] = 100 + tenths / 10
        before = len(runner.running)
        runner._start(waiting)
        at += [tenths / 10] * (len(runner.running) - before)
    assert at == [0.0, 2.5, 5.0] and len(waiting) == 1
