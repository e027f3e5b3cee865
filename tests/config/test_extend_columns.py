"""A run whose reward, environment and metric read other columns of a row, in the processes that Ray has for
them, and whose environment is closed."""

import json
import os
from collections import Counter

import pytest
from end_to_end import command, finish, metrics
from places import PYTHONPATH
from test_extend import policy

OWN = """
from pathlib import Path

from trainer.rewards import em

NOTES = Path(__file__).with_name("notes.txt")


def note(line):
    with NOTES.open("a") as file:
        file.write(line + "\\n")


class Guess:
    def __init__(self, question):
        self.level = question.columns["extra_info"]["level"]
        note("made")

    async def __call__(self, content):
        return f"wrong {self.level}"

    def close(self):
        note("closed")


def leveled(trajectory):
    return em(trajectory) * trajectory.question.columns["extra_info"]["level"]


leveled.right_at = 0.5


def levels(trajectories, rewards):
    found = [t.question.columns["supporting_facts"][0][1] for t in trajectories]
    return {"my/level": sum(found) / len(found)}
"""


@pytest.mark.ray
@pytest.mark.timeout(420)
def test_columns_reach_each_process_and_each_object_is_closed(tmp_path):
    (tmp_path / "levels_of_rows.py").write_text(OWN)
    here = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PYTHONPATH}"}
    row = {"golden_answers": ["n21"], "extra_info": {"level": 1}, "supporting_facts": [["n1", 1]]}
    rows = [row | {"id": f"q{i}", "question": f"where is n{i} ?"} for i in range(8)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = {
        "run": {"name": "mine", "dir": str(tmp_path)},
        "model": {"path": str(policy(tmp_path / "model"))},
        "data": {"train": str(tmp_path / "questions.jsonl")},
        "retriever": {"index": "examples.extend.retriever:search"},
        "reward": {"kind": "levels_of_rows:leveled", "right_at": 0.8},
        "rollout": {
            "engine": "transformers",
            "template": "examples.extend.template:Brief",
            "tools": {"calculator": "examples.extend.tool:calculator", "guess": "levels_of_rows:Guess"},
            "prompts_per_step": 6,
            "group_size": 4,
            "max_turns": 2,
            "max_response_tokens": 8,
            "max_obs_tokens": 24,
            "max_prompt_tokens": 32,
            "max_model_tokens": 120,
            "kv_cache_gib": 0.1,
        },
        "learner": {"lr": 1e-3, "zero_stage": 0, "tokens_per_microbatch": 4096},
        "control": {"port": 0},
        "trainer": {
            "steps": 1,
            "checkpoint_every": 0,
            "eval_at_ends": False,
            "metrics": ["levels_of_rows:levels"],
        },
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(raw))
    code, out = finish(command("train", "--config", tmp_path / "mine.yaml", environment=here), 400)
    assert code == 0, out
    (step,) = metrics(tmp_path / "mine")
    assert step["my/level"] == 1.0 and step["reward/mean"] > 0
    noted = Counter((tmp_path / "notes.txt").read_text().split())
    assert noted["made"] == noted["closed"] > 0
    said = " ".join(out.split())
    assert "reward.right_at=0.8 is set, and counts in place of 0.5, the attribute right_at" in said
