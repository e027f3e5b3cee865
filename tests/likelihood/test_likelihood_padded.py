"""Records and lag probe for other trainers' padded batches; the TRL callback, where TRL is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import httpx
import numpy as np
import pytest
from places import ROOT

from services.likelihood.metrics.padded import LagMemory, padded_records
from services.likelihood.metrics.verdicts import is_right
from services.likelihood.records import StepRecord
from services.likelihood.rest.launch import ServeSettings, serve_in_thread


def test_unbroken_runs_of_the_mask_are_actions():
    mask = [[1, 1, 0, 1, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]]
    before = np.array([[-1, -2, 9, -3, 9], [9, -1, -1, -1, -1], [9, 9, 9, 9, 9]], float)
    records = padded_records(
        mask, before, [1.0, -1.0, 0.0], ["g", "g", "h"], after=before - 0.5, rewards=[1, 0, 0]
    )
    assert records[0] == {
        "uid": "0", "group": "g", "reward": 1.0, "advantage": 1.0, "tool_rounds": 1,
        "actions": [
            {"tokens": 2, "logp_before": -3.0, "logp_after": -4.0},
            {"tokens": 1, "logp_before": -3.0, "logp_after": -3.5},
        ],
    }  # fmt: skip
    assert [a["tokens"] for a in records[1]["actions"]] == [4] and records[2]["actions"] == []
    assert StepRecord(step=0, trajectories=records).trajectories[0].advantage == 1.0


def test_advantages_may_come_a_token_and_tensors_may_be_half_precision():
    torch = pytest.importorskip("torch")
    mask = torch.tensor([[1, 1, 0]])
    logp = torch.tensor([[-1.0, -2.0, 5.0]], dtype=torch.bfloat16, requires_grad=True)
    (record,) = padded_records(mask, logp, torch.tensor([[0.5, 0.5, 0.0]]), ["g"])
    assert (
        record["advantage"] == 0.5
        and record["actions"][0]["logp_before"] == -3.0
        and record["actions"][0]["logp_after"] is None
    )


def test_the_lag_probe_compares_right_rows_with_what_they_were():
    memory, mask = LagMemory(lag_steps=2), np.ones((2, 3))
    level = {"now": -1.0}
    got = []
    for step in range(5):
        level["now"] = -1.0 - 0.1 * step
        batch = {"ids": np.array([step, 100 + step])}
        got.append(
            memory.probe(
                batch,
                mask,
                np.full((2, 3), level["now"]),
                [1.0, -1.0],
                lambda b: np.full((len(b["ids"]), 3), level["now"]),
            )
        )
        if step >= 2:
            assert memory._kept[-1][0]["ids"].tolist() == [step]  # right rows alone
    assert got[:2] == [None, None] and got[2:] == pytest.approx([-0.2] * 3)


def test_the_lag_probe_follows_the_answers_that_the_reward_calls_right():
    memory, mask, logp = LagMemory(lag_steps=1), np.ones((3, 2)), np.full((3, 2), -1.0)
    right = is_right([0.4, 1.0, 1.0])
    memory.probe({"ids": np.arange(3)}, mask, logp, [1.0, 0.0, -0.5], lambda b: None, right=right)
    assert memory._kept[0][0]["ids"].tolist() == [
        1
    ]  # not the best of the wrong ones, nor one that is pushed down


def test_a_reward_that_is_not_there_is_posted_as_unknown():
    mask, before = np.ones((3, 1)), np.full((3, 1), -1.0)
    rewards = [1.0, float("nan"), 0.7]
    records = padded_records(
        mask, before, [0.5, float("nan"), -0.5], "ggh", rewards=rewards, right=is_right(rewards, 0.7)
    )
    step = StepRecord(step=0, trajectories=records)  # what is not finite would be refused with the whole step
    assert [(t.reward, t.advantage, t.right) for t in step.trajectories] == [
        (1.0, 0.5, True),
        (None, 0.0, None),
        (0.7, -0.5, True),
    ]


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed (pip install trl)")
def test_the_trl_callback_posts_every_step_of_a_real_grpo_run(tmp_path):
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / "trl_callback.py"), server.url, "8"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    series = httpx.get(f"{server.url}/v1/runs/trl/series").json()
    server.stop()
    assert series["step"] == list(range(1, 9))
    curves = series["series"]
    assert all(v is not None and v <= 0 for v in curves["logp/wrong"]["mean"])
    assert all(0 <= v <= 1 for v in curves["reward/mean"]["mean"])
    assert [v is not None for v in curves["probe/lag"]["mean"]] == [False] * 5 + [True] * 3
    # scored before the update with the weights that sampled: surprise equals entropy, roughly, on 32 short
    # samples
    assert -curves["logp/wrong"]["mean"][0] == pytest.approx(curves["entropy"]["mean"][0], rel=0.1)


@pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed (pip install verl)"
)
def test_the_older_trainer_of_verl_posts_an_actor_update(tmp_path):
    """verl's own batches; the workers' scoring and update are stood in for, since they need GPUs."""
    import inspect

    import torch
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    assert list(inspect.signature(RayPPOTrainer._update_actor).parameters) == ["self", "batch"]
    assert list(inspect.signature(RayPPOTrainer._compute_old_log_prob).parameters) == ["self", "batch"]
    sys.path.insert(0, str(ROOT / "examples"))
    from verl_callback import Watch, watched_v0

    class Trainer:
        actor_rollout_wg = type("Workers", (), {"world_size": 2})
        global_steps, level = 0, -1.0

        def _update_actor(self, batch):
            type(self).level -= 0.25
            return DataProto.from_single_dict({}, meta_info={"metrics": {"actor/grad_norm": [1.0, 3.0]}})

        def _compute_old_log_prob(self, batch):
            assert len(batch) % 2 == 0
            return DataProto.from_dict({"old_log_probs": torch.full((len(batch), 4), self.level)}), 0.0

    server = serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0))
    watch = Watch(server.url, "verl", str(tmp_path / "spool"), attempt=0, right_at=1.0)
    trainer = watched_v0(Trainer, watch)()
    for step in range(7):
        trainer.global_steps = step
        mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [1, 0, 0, 0]])
        batch = DataProto.from_dict(
            {
                "response_mask": mask,
                "old_log_probs": torch.full((3, 4), trainer.level),
                "advantages": torch.tensor([[1.0], [-1.0], [0.0]]) * mask,
                "token_level_scores": torch.tensor([[0.0, 0, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]),
            },
            {"uid": np.array(["g", "g", "h"], dtype=object)},
        )
        trainer._update_actor(batch)
    watch.client.close()
    metrics = httpx.get(f"{server.url}/v1/runs/verl/summary").json()["metrics"]
    server.stop()
    assert metrics["displacement/mean"] == pytest.approx(-0.25) and metrics["grad_norm"] == 2.0
    assert metrics["probe/lag"] == pytest.approx(-1.5) and metrics["reward/mean"] == pytest.approx(2 / 3)
