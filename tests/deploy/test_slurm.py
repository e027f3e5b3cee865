"""deploy/slurm/train.sbatch with stand-ins for Slurm's commands and Ray's: what it asks them for, and that
Ray, submit.py and `unspiral train` take it. There is no Slurm here."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from test_deploy_compose import load_script
from test_docs_commands import parsed

SCRIPT = ROOT / "deploy/slurm/train.sbatch"
TEXT = SCRIPT.read_text(encoding="utf-8")
PAGE = (ROOT / "docs/slurm.md").read_text(encoding="utf-8")
STAND_IN = """#!{python}
import json, os, signal, subprocess, sys, time
name, log = os.path.basename(sys.argv[0]), {log!r}
if name == "python" and sys.argv[1] == "-c":
    exec(sys.argv[2])
    sys.exit()
task = None
def ended(number, frame):
    if task:
        os.killpg(task.pid, number)
    note(ended=number)
    sys.exit(143 if name == "python" else 0)
def note(**more):
    kept = {{k: v for k, v in os.environ.items() if k.startswith("RAY_")}}
    with open(log, "a") as file:
        file.write(json.dumps({{"name": name, "asked": sys.argv[1:], "env": kept, **more}}) + "\\n")
signal.signal(signal.SIGTERM, ended)
note()
joined = [line for line in open(log) if '"name": "ray"' in line and "--address=" in line]
if name == "ray" and "--head" not in sys.argv and os.environ.get("HEAD_IS_LATE") and len(joined) < 2:
    sys.exit(1)
if name == "srun":
    task = subprocess.Popen(sys.argv[sys.argv.index("bash"):], start_new_session=True)
    while task.poll() is None:
        time.sleep(0.05)
while name == "python" and open(log).read().count('"name": "ray"') < int(os.environ["NODES_OF_RAY"]):
    time.sleep(0.05)
if name == "python" and not os.environ.get("LASTS"):
    sys.exit(int(os.environ.get("STATUS", "0")))
while name != "scontrol":
    time.sleep(0.05)
"""


class Job:
    """The script as Slurm's batch step would run it, in a folder of its own."""

    def __init__(self, folder: Path, *arguments: str, **environment: str):
        self.log = folder / "asked.jsonl"
        bin = folder / ".venv" / "bin"
        bin.mkdir(parents=True)
        (bin / "activate").write_text(f'export PATH="{bin}:$PATH"\n')
        for name in ("ray", "srun", "scontrol", "python"):
            (bin / name).write_text(STAND_IN.format(python=sys.executable, log=str(self.log)))
            (bin / name).chmod(0o755)
        given = {
            "SLURM_SUBMIT_DIR": str(folder),
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURMD_NODENAME": "node1",
            "SLURM_GPUS_ON_NODE": "8",
            "SLURM_CPUS_PER_TASK": "64",
            "HEAD_ADDRESS": "10.0.0.7",
        }
        given |= environment
        given["NODES_OF_RAY"] = {"1": "1"}.get(
            given["SLURM_JOB_NUM_NODES"], "3" if "HEAD_IS_LATE" in given else "2"
        )
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "RAY_", "UNSPIRAL"))}
        self.process = subprocess.Popen(
            ["bash", str(SCRIPT), *arguments],
            env=kept | {k: v for k, v in given.items() if v},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ends(self) -> tuple[int, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out + err

    def asked(self, name: str, ended: bool = False) -> list[dict]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        found = [json.loads(line) for line in lines]
        return [one for one in found if one["name"] == name and ("ended" in one) is ended]


def ran(folder, *arguments, **environment):
    job = Job(folder, *arguments, **environment)
    status, said = job.ends()
    return job, status, said


def start_of_ray(asked: list[str]) -> dict:
    """The options of a `ray start`, by Ray's own parser."""
    pytest.importorskip("ray")
    from ray.scripts.scripts import start

    assert asked[0] == "start"
    found = start.make_context("start", asked[1:]).params
    return found | {"resources": json.loads(found["resources"])}


def test_two_nodes_of_eight_cards_have_a_learner_and_fifteen_workers(tmp_path):
    job, status, said = ran(tmp_path, "--config", "mine.yaml", "run.dir=/shared/runs")
    assert status == 0, said
    assert "head and the driver on node1 (10.0.0.7), 1 learner ranks, 15 rollout workers" in said
    starts = [start_of_ray(one["asked"]) for one in job.asked("ray")]
    head, other = sorted(starts, key=lambda one: not one["head"])
    assert head["resources"] == {"learner": 1, "rollout": 7} and other["resources"] == {"rollout": 8}
    assert (head["node_ip_address"], head["port"]) == ("10.0.0.7", 23456)
    assert (other["head"], other["address"]) == (False, "10.0.0.7:23456")
    for one in (head, other):
        assert (one["num_cpus"], one["num_gpus"], one["block"]) == (64, 8, True)
        assert one["temp_dir"] == "/tmp/unspiral-123456"
    (srun,) = job.asked("srun")
    assert srun["asked"][:3] == ["--nodes=1", "--ntasks=1", "--exclude=node1"]
    (submitted,) = job.asked("python")
    assert submitted["asked"][0] == "deploy/ray/submit.py" and (ROOT / submitted["asked"][0]).exists()
    asked = load_script("deploy/ray/submit.py").arguments(submitted["asked"][1:])
    assert asked.address == f"http://127.0.0.1:{head['dashboard_port']}"
    assert asked.wait_for == ["learner=1", "rollout=15"]
    assert [asked.command, *asked.rest] == [
        *("train", "--config", "mine.yaml", "run.dir=/shared/runs", "--resume", "latest")
    ]
    parsed([asked.command, *asked.rest])
    tokens = {one["env"]["RAY_AUTH_TOKEN"] for name in ("ray", "srun", "python") for one in job.asked(name)}
    modes = {one["env"]["RAY_AUTH_MODE"] for name in ("ray", "srun", "python") for one in job.asked(name)}
    assert len(tokens) == 1 and len(tokens.pop()) == 48 and modes == {"token"}
    assert "RAY_AUTH_TOKEN" not in said


@pytest.mark.parametrize(
    ("environment", "head", "waits"),
    [
        ({"LEARNER_RANKS": "4"}, {"learner": 4, "rollout": 4}, ["learner=4", "rollout=12"]),
        ({"LEARNER_RANKS": "8"}, {"learner": 8}, ["learner=8", "rollout=8"]),
        ({"SLURM_JOB_NUM_NODES": "1"}, {"learner": 1, "rollout": 7}, ["learner=1", "rollout=7"]),
        ({"SLURM_GPUS_ON_NODE": "", "SLURM_JOB_NUM_NODES": "3"}, {"learner": 1}, ["learner=1", "rollout=2"]),
        ({"SLURM_GPUS_ON_NODE": "", "SLURM_JOB_NUM_NODES": "1"}, {"learner": 1, "rollout": 1}, None),
    ],
)
def test_cards_and_nodes_are_counted(tmp_path, environment, head, waits):
    job, status, said = ran(tmp_path, "--config", "mine.yaml", **environment)
    assert status == 0, said
    starts = [start_of_ray(one["asked"]) for one in job.asked("ray")]
    assert [one["resources"] for one in starts if one["head"]] == [head]
    (submitted,) = job.asked("python")
    found = re.findall(r"--wait-for (\S+)", " ".join(submitted["asked"]))
    assert found == (waits or ["learner=1", "rollout=1"])


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"LEARNER_RANKS": "9"}, "2 nodes of 8 GPUs have no room for 9 learner ranks and a rollout worker"),
        ({"LEARNER_RANKS": "8", "SLURM_JOB_NUM_NODES": "1"}, "1 nodes of 8 GPUs have no room for 8 learner"),
        (
            {"HEAD_ADDRESS": "127.0.1.1"},
            "this node calls itself 127.0.1.1: set HEAD_ADDRESS to an address by",
        ),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_starts(tmp_path, environment, said):
    job, status, printed = ran(tmp_path, "--config", "mine.yaml", **environment)
    assert (status, job.asked("ray")) == (2, []) and said in printed and printed.count("\n") == 1


def test_slurms_signal_reaches_the_training_whose_status_counts(tmp_path):
    job = Job(tmp_path, "--config", "mine.yaml", LASTS="1", UNSPIRAL_REQUEUE="1")
    while not (job.asked("python") and len(job.asked("ray")) == 2):  # they have begun, and heed signals
        assert job.process.poll() is None
    job.process.send_signal(signal.SIGTERM)
    status, said = job.ends()
    assert status == 143, said
    assert [one["ended"] for one in job.asked("python", ended=True)] == [signal.SIGTERM]
    assert [one["asked"] for one in job.asked("scontrol")] == [["requeue", "123456"]]


def test_a_node_that_comes_before_the_head_is_up_tries_again(tmp_path):
    """Ray waits for half a minute and then gives up."""
    job, status, said = ran(tmp_path, "--config", "mine.yaml", HEAD_IS_LATE="1")
    assert status == 0, said
    addresses = [start_of_ray(one["asked"])["address"] for one in job.asked("ray")]
    assert sorted(filter(None, addresses)) == ["10.0.0.7:23456"] * 2


@pytest.mark.parametrize(("status", "asked"), [(2, []), (0, [])])
def test_a_run_that_ended_by_itself_is_not_put_back(tmp_path, status, asked):
    job, found, _ = ran(
        tmp_path, "--config", "m.yaml", "--resume=x", STATUS=str(status), UNSPIRAL_REQUEUE="1"
    )
    assert (found, job.asked("scontrol")) == (status, asked)
    assert "latest" not in job.asked("python")[0]["asked"]


def test_slurm_tells_the_script_in_time_for_a_step_and_its_checkpoint():
    given = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", TEXT, re.M))
    (seconds,) = re.findall(r"^B:TERM@(\d+)$", given["signal"])
    (waits,) = re.findall(r"RAY_JOB_STOP_WAIT_TIME_S:-(\d+)", TEXT)
    assert int(waits) < int(seconds)
    assert f"--signal=B:TERM@{seconds}" in PAGE and f"{waits} s for both" in PAGE
    asked = re.findall(r"^#SBATCH --([\w-]+)", TEXT, re.M)
    assert asked[:3] == ["job-name", "ntasks-per-node", "exclusive"]
    assert asked[3:] == ["time", "signal", "requeue", "open-mode", "output"]


def test_the_page_names_each_variable_of_the_script_and_says_that_it_was_not_run():
    own = set(re.findall(r"\$\{(\w+):-", TEXT)) - {"SLURM_GPUS_ON_NODE", "SLURM_CPUS_PER_TASK"}
    assert own == {
        *("UNSPIRAL_VENV", "LEARNER_RANKS", "HEAD_ADDRESS", "RAY_JOB_STOP_WAIT_TIME_S", "UNSPIRAL_REQUEUE")
    }
    assert all(f"`{name}=" in PAGE or f"`{name}`" in PAGE for name in own)
    assert "Neither was run on a Slurm cluster" in PAGE
    (wrapped,) = re.findall(r"--wrap 'exec \.venv/bin/unspiral (.+?)'", PAGE)
    parsed(wrapped.split())
