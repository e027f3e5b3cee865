"""`make study` twice gives the same numbers: its own configuration, a few steps of it, in one process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from places import ROOT

from benchmarks.collapse.judged.collected import evaluations, fingerprint, reproducible
from services.common.files import json_lines
from trainer.config.schema import dump_config, parse_config
from trainer.lab.demo import collapse_config, prepare
from trainer.lab.show import ARMS

STEPS = 2
SCRIPT = """
import sys
from pathlib import Path
from benchmarks.barometer import faults, one_process
from trainer.config.schema import load_config
config = load_config(Path(sys.argv[1]))
sys.exit(one_process.train(config, faults.Fault(config.seed))["exit"])
"""


def started(files, folder, arm):
    """The arm as the command runs it, but for vLLM, Ray and the number of steps and questions."""
    raw = collapse_config(files, folder=folder, name=arm, seed=0, llds_lambda=ARMS[arm], steps=STEPS)
    raw["rollout"]["engine"] = "transformers"
    raw["learner"]["zero_stage"] = 0
    raw["evaluation"]["limit"] = 10
    raw["control"] = {"enabled": False}
    file = folder / f"{arm}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dump_config(parse_config(raw)))
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(file)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_the_same_numbers_come_out_twice_and_arms_share_the_first_batch(tmp_path):
    files = prepare(tmp_path / "lab", 0)
    runs = {(name, arm): tmp_path / name / arm for name, arm in (("a", "llds"), ("b", "llds"), ("a", "grpo"))}
    for name, arm in runs:
        process = started(files, tmp_path / name, arm)
        out, _ = process.communicate(timeout=280)
        assert process.returncode == 0, out
    rows = {run: json_lines(folder / "metrics.jsonl") for run, folder in runs.items()}
    scores = {run: evaluations(json_lines(folder / "events.jsonl")) for run, folder in runs.items()}
    prints = {run: fingerprint(rows[run], scores[run]) for run in runs}
    for one, other in zip(rows["a", "llds"], rows["b", "llds"], strict=True):
        assert reproducible(one) == reproducible(other)
    assert prints["a", "llds"] == prints["b", "llds"] != prints["a", "grpo"]
    assert len(rows["a", "llds"]) == STEPS and len(scores["a", "llds"]) == 4
    first = [
        [json.loads(line)["segments"] for line in (folder / "trajectories" / "step_000001.jsonl").open()]
        for folder in runs.values()
    ]
    assert first[0] == first[1] == first[2] and len(first[0]) == 40
