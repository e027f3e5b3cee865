"""What the adapters post: the calls of each trainer's step, on its own data structures where it is installed
(tests/health/trainers.py), and the service's answer."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from test_examples_verl import verl  # noqa: E402, F401

from services.common.errors import EnvironmentLacks, UserError  # noqa: E402
from tests.health import trainers  # noqa: E402
from tests.likelihood.likelihood_service import serving  # noqa: E402
from unspiral_health import LLDS, Run  # noqa: E402
from unspiral_health.adapters import launch  # noqa: E402

MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]])
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.5])


def rows_of(server, run, step):
    url = f"{server.url}/v1/runs/{run}/steps/{step}/trajectories"
    return {row["uid"]: row for row in httpx.get(url, trust_env=False).json()}


def metrics_of(server, run, step):
    steps = httpx.get(f"{server.url}/v1/runs/{run}/steps", trust_env=False).json()
    return next(s["metrics"] for s in steps if s["step"] == step)


def test_a_run_needs_an_address_and_a_name_and_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv("UNSPIRAL_LIKELIHOOD_URL", raising=False)
    monkeypatch.delenv("UNSPIRAL_RUN", raising=False)
    with pytest.raises(UserError, match="address: not given; pass it, or set UNSPIRAL_LIKELIHOOD_URL"):
        Run()
    with pytest.raises(UserError, match="run's name: not given; pass it, or set UNSPIRAL_RUN"):
        Run("http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"trainer 'vrel': .*did you mean verl"):
        Run("http://127.0.0.1:9", "r", trainer="vrel")
    monkeypatch.setenv("UNSPIRAL_LIKELIHOOD_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("UNSPIRAL_RUN", "mine")
    run = Run(spool_dir=tmp_path)
    assert (run.client.url, run.name) == ("http://127.0.0.1:9", "mine")
    with pytest.raises(EnvironmentLacks, match="run mine: no update of the policy was seen"):
        run.confirm(1)
    run.post(1, {"reward/mean": 0.5})
    with pytest.raises(EnvironmentLacks, match=r"mine/alarms: 1 messages are not stored after 0\.1 s"):
        run.alarms(timeout=0.1)
    run.client.close(timeout=0.1)


def test_metrics_come_by_both_names_and_text_is_passed_over(tmp_path):
    with serving(tmp_path) as server, Run(server.url, "r", spool_dir=tmp_path / "s", trainer="verl") as run:
        said = {"actor/grad_norm": [1.0, 3.0], "actor/llds/active_tokens": torch.tensor(7), "note": "text"}
        run.post(3, said | {"critic/score/mean": 0.25, "nothing": []})
        run.event(3, "resume", "from step 2")
        assert run.phase() == "unknown" and run.alarms() == []
        found = metrics_of(server, "r", 3)
    assert found["grad_norm"] == 2.0 and found["actor/grad_norm"] == 2.0 and found["reward/mean"] == 0.25
    assert found["llds/active_tokens"] == 7.0 and "note" not in found and "nothing" not in found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mask": np.ones((2, 2, 3))}, r"mask: expected \[B, T\], got \[2, 2, 3\]"),
        ({"before": -np.ones((2, 4))}, r"before: expected \[2, 3\] as mask has, got \[2, 4\]"),
        ({"after": np.ones((2, 3))}, "after: expected log-probs, which are at most 0, got 1"),
        (
            {"advantages": np.zeros((2, 2))},
            r"advantages: expected \[2\] or \[2, 3\], as mask has, got \[2, 2\]",
        ),
        ({"groups": ["a", "a", "a"]}, "groups: expected 2, one per row of mask, got 3"),
        ({"rewards": [1.0]}, "rewards: expected 2, one per row of mask, got 1"),
    ],
)
def test_an_update_that_does_not_fit_is_refused_by_name(tmp_path, change, said):
    logp = -np.ones((2, 3))
    given = {"mask": np.ones((2, 3)), "before": logp, "advantages": [1.0, -1.0], "groups": ["a", "a"]}
    with Run("http://127.0.0.1:9", "r", spool_dir=tmp_path) as run, pytest.raises(UserError, match=said):
        run.update(0, **given | {"after": logp, "rewards": [1.0, 0.0]} | change)


def test_a_metric_that_is_no_number_is_told_once(tmp_path, caplog):
    with Run("http://127.0.0.1:9", "r", spool_dir=tmp_path) as run:
        for step in range(2):
            run.post(step, {"reward/mean": 0.5, "loss": "high"})
    assert [r.message for r in caplog.records if "left out" in r.message] == [
        "run r: no numbers, and left out: 'loss'"
    ]


def test_each_rank_posts_its_rows_and_the_first_the_metrics(tmp_path):
    before = -torch.ones(4, 4)
    with serving(tmp_path) as server:
        for rank in range(2):
            with Run(server.url, "r", spool_dir=tmp_path / "spool", rank=rank) as run:
                more = {"after": before - 0.5, "metrics": {"grad_norm": 1.0 + rank}}
                run.update(0, MASK, before, ADVANTAGES, ["g", "g", "h", "h"], **more)
        rows, found = rows_of(server, "r", 0), metrics_of(server, "r", 0)
    assert sorted(rows) == [f"{rank}-{row}" for rank in range(2) for row in range(4)]
    assert found["grad_norm"] == 1.0 and found["displacement/mean"] == pytest.approx(-0.5)
    assert [a["tokens"] for a in rows["1-0"]["actions"]] == [2, 1]
    assert sorted(p.name for p in (tmp_path / "spool").iterdir()) == ["rank-0", "rank-1"]


def test_openrlhfs_actor_posts_after_each_fit_and_trains_with_llds(tmp_path, monkeypatch):
    if trainers.installed("openrlhf"):
        experience = importlib.import_module("openrlhf.trainer.ppo_utils.experience")
    else:
        experience = trainers.module(
            monkeypatch, "openrlhf.trainer.ppo_utils.experience", make_experience_batch=stacked
        )
    trainers.openrlhf(monkeypatch, LLDS())
    adapter = importlib.import_module("unspiral_health.adapters.openrlhf")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)

    class Actor:
        """OpenRLHF's policy actor, as far as a fit goes."""

        level = -1.0

        def __init__(self):
            args = SimpleNamespace(ds=SimpleNamespace(zero_stage=2))
            self.strategy = SimpleNamespace(args=args)
            buffer = SimpleNamespace(items=[])
            loss = torch.nn.Identity()
            self.trainer = SimpleNamespace(actor_loss_fn=loss, replay_buffer=buffer, micro_train_batch_size=3)

        def fit(self, kl_ctl=0):
            type(self).level -= 0.25
            self.trainer.replay_buffer.items.clear()
            return {"actor_grad_norm": 2.0, "reward": 0.5}

        def forward(self, sequences, action_mask, attention_mask):
            assert len(sequences) <= 3
            return torch.full(action_mask.shape, self.level)

    with serving(tmp_path) as server:
        monkeypatch.chdir(tmp_path)
        actor = adapter.watched(Actor, LLDS(0.3), server.url, "o")()
        for _ in range(7):
            actor.trainer.replay_buffer.items += items(experience, actor.level)
            status = actor.fit(kl_ctl=0.0)
        actor.unspiral.close()
        rows, found = rows_of(server, "o", 7), metrics_of(server, "o", 7)
    assert status["actor_grad_norm"] == 2.0 and actor.trainer.actor_loss_fn.llds.lam == 0.3
    assert isinstance(actor.trainer.actor_loss_fn, adapter.WithLLDS)
    assert found["grad_norm"] == 2.0 and found["displacement/mean"] == pytest.approx(-0.25)
    assert found["probe/lag"] == pytest.approx(-1.5)  # six fits of .25 nats
    assert [rows[f"0-{i}"]["reward"] for i in range(4)] == [1.0, 0.0, 1.0, 0.0]
    assert rows["0-0"]["group"] == rows["0-1"]["group"] != rows["0-2"]["group"]
    assert rows["0-0"]["advantage"] == 1.0 and len(rows["0-0"]["actions"]) == 2


@pytest.fixture
def watched_verl(verl, monkeypatch):
    """verl's v1 trainer by its registry, and the adapter."""
    adapter = importlib.import_module("unspiral_health.adapters.verl")
    return verl, adapter


def test_verls_trainer_posts_its_rows_after_every_update(watched_verl, tmp_path, capsys):
    verl, adapter = watched_verl
    config = verl.config("sync")
    with serving(tmp_path) as server:
        with Run(server.url, "v", spool_dir=tmp_path / "spool", trainer="verl") as run:
            adapter.watched(verl.registry["sync"], run)(config).fit(2)
        rows, found = rows_of(server, "v", 2), metrics_of(server, "v", 2)
    assert capsys.readouterr().out == (
        f"likelihood: step 1 of run v: 3 trajectories posted to {server.url}, stored\n"
    )
    assert [rows[f"0-{i}"]["group"] for i in range(len(rows))] == ["q0", "q0", "q1"]  # without the padding
    assert [rows[f"0-{i}"]["reward"] for i in range(3)] == [1.0, 0.0, 0.0]
    (action,) = rows["0-1"]["actions"]
    assert (action["tokens"], action["logp_before"], action["logp_after"]) == (2, -2.0, -4.0)
    assert found["grad_norm"] == 0.25 and found["displacement/mean"] < 0


class TaskRunner:
    """verl's, as far as it looks up its trainer."""

    def run(self, config):
        registry = sys.modules["verl.trainer.ppo.v1.trainer_base"].TRAINER_REGISTRY
        registry[config.trainer.v1.trainer_mode](config).fit(2)


def test_verls_command_watches_the_trainer_that_it_runs_and_is_never_silent(
    watched_verl, tmp_path, monkeypatch
):
    verl, _ = watched_verl
    monkeypatch.chdir(tmp_path)
    runner = launch.watching(TaskRunner)
    with serving(tmp_path) as server:
        monkeypatch.setenv("UNSPIRAL_LIKELIHOOD_URL", server.url)
        monkeypatch.setenv("UNSPIRAL_RUN", "v")
        runner().run(verl.config("sync"))
        assert len(rows_of(server, "v", 2)) == 3
        with pytest.raises(EnvironmentLacks, match="run v: no update of the policy was seen"):
            runner().run(verl.config("renamed"))  # it updates the actor by another name


def items(experience, level):
    """One Experience per sample, as the replay buffer holds them."""
    kind = getattr(experience, "Experience", SimpleNamespace)
    return [
        kind(
            sequences=torch.arange(7),
            attention_mask=torch.ones(7, dtype=torch.long),
            action_mask=MASK[b],
            action_log_probs=torch.full((4,), level),
            advantages=ADVANTAGES[b] * MASK[b],
            rewards=torch.tensor(float(b % 2 == 0)),
            prompts=["first" if b < 2 else "second"],
        )
        for b in range(4)
    ]


def stacked(items):
    names = ("sequences", "attention_mask", "action_mask", "action_log_probs", "advantages", "rewards")
    columns = {name: torch.stack([getattr(item, name) for item in items]) for name in names}
    return SimpleNamespace(**columns, prompts=[p for item in items for p in item.prompts])


def test_skyrls_callback_posts_every_step_without_its_padding(tmp_path, monkeypatch):
    trainers.skyrl(monkeypatch, LLDS())
    adapter = sys.modules["unspiral_health.adapters.skyrl"]

    class Trainer:
        level = -1.0
        dispatch = SimpleNamespace(dp_size=lambda model: 3)

        def __init__(self):
            self.all_metrics = {"reward/avg_raw_reward": 0.5}

        def _execute_forward_pass(self, model, batch, key, mini_batch_boundaries):
            assert (model, key, batch.metadata["response_length"]) == ("policy", "logprobs", 4)
            assert len(batch) % 3 == 0
            return torch.full((len(batch), 4), self.level)

    trainer = Trainer()
    with serving(tmp_path) as server:
        callback = adapter.LikelihoodCallback(server.url, "s", spool_dir=tmp_path / "spool")
        for step in range(1, 8):
            prompts = torch.tensor([[0, 5], [0, 5], [6, 7], [6, 7], [0, 5]])
            ones = torch.ones(5, 4, dtype=torch.long)
            batch = adapter.TrainingInputBatch(
                {
                    "sequences": torch.cat([prompts, ones], 1),
                    "attention_mask": torch.cat(
                        [(prompts > 0).long(), torch.ones(5, 4, dtype=torch.long)], 1
                    ),
                    "loss_mask": torch.cat([MASK, torch.zeros(1, 4, dtype=torch.long)]),
                    "action_log_probs": torch.full((5, 4), trainer.level),
                    "advantages": torch.cat([ADVANTAGES, torch.zeros(1)])[:, None].expand(5, 4).clone(),
                }
            )
            batch.metadata = {"response_length": 4, "pad_size": 1}
            trainer.level -= 0.25
            said = {"grad_norm": 2.0, "loss_metrics/llds/active_tokens": 3.0}
            callback.on_step_end(trainer, SimpleNamespace(batch=batch, metrics=said, global_step=step), None)
        callback.on_train_end(trainer, None, None)
        rows, found = rows_of(server, "s", 7), metrics_of(server, "s", 7)
    assert sorted(rows) == ["0-0", "0-1", "0-2", "0-3"]
    assert rows["0-0"]["group"] == rows["0-1"]["group"] != rows["0-2"]["group"]
    assert found["displacement/mean"] == pytest.approx(-0.25) and found["probe/lag"] == pytest.approx(-1.5)
    assert found["reward/mean"] == 0.5 and found["llds/active_tokens"] == 3.0 and found["grad_norm"] == 2.0


def test_slimes_hook_posts_every_rollout_after_its_training(tmp_path, monkeypatch):
    trainers.slime(monkeypatch, LLDS())
    adapter = importlib.import_module("unspiral_health.adapters.slime")

    class Actor:
        level = -1.0

        def train_actor(self, rollout_id, rollout_data, external_data=None):
            self.level -= 0.25

        def compute_log_prob(self, iterator, num_microbatches):
            assert (iterator, num_microbatches) == ("iterator", [1])
            return {"log_probs": [torch.full((n,), self.level) for n in (4, 2)]}

    trainers.module(
        monkeypatch,
        "slime.backends.megatron_utils.actor",
        MegatronTrainRayActor=Actor,
        get_data_iterator=lambda data: "iterator",
    )
    ranks = {"get_tensor_model_parallel_rank": 0, "get_data_parallel_rank": 1, "is_pipeline_last_stage": True}
    mpu = SimpleNamespace(**{name: lambda value=value: value for name, value in ranks.items()})
    trainers.module(monkeypatch, "megatron.core", mpu=mpu)
    with serving(tmp_path) as server:
        monkeypatch.setenv("UNSPIRAL_LIKELIHOOD_URL", server.url)
        monkeypatch.setenv("UNSPIRAL_RUN", "l")
        monkeypatch.chdir(tmp_path)
        adapter.watch(SimpleNamespace(n_samples_per_prompt=2))
        data = {
            "num_microbatches": [1],
            "loss_masks": [torch.tensor([1, 1, 0, 1]), torch.tensor([1, 1])],
            "log_probs": [torch.full((4,), -1.0), torch.full((2,), -1.0)],
            "advantages": [torch.full((4,), 1.0), torch.full((2,), -1.0)],
            "sample_indices": [6, 7],
            "raw_reward": [0.0, 0.0, 1.0, 0.0],
            "partition": [2, 3],
        }
        Actor().train_actor(4, data, external_data=None)
        rows = rows_of(server, "l", 4)
    assert sorted(rows) == ["1-0", "1-1"] and rows["1-0"]["group"] == rows["1-1"]["group"] == "3"
    assert [rows[f"1-{i}"]["reward"] for i in range(2)] == [1.0, 0.0]
    first = rows["1-0"]["actions"]
    assert [(a["tokens"], a["logp_before"], a["logp_after"]) for a in first] == [
        (2, -2, -2.5),
        (1, -1, -1.25),
    ]
