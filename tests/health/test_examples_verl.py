"""verl's callback around classes shaped as those of verl 0.9.1: it watches the trainer that is built, and is
never silent."""

import importlib.util
import sys
import types
from types import SimpleNamespace

import httpx
import pytest
from places import ROOT

from tests.likelihood.likelihood_service import serving

torch = pytest.importorskip("torch")
FILE = ROOT / "examples" / "verl_callback.py"
PROMPT, RESPONSES = 3, [4, 2, 5, 5]


def nested(rows):
    return torch.nested.as_nested_tensor(
        [torch.as_tensor(r, dtype=torch.float32) for r in rows], layout=torch.jagged
    )


class Fields(dict):
    """What the queue gives: columns, some of them jagged."""

    def to_padded_tensor(self):
        return Fields(
            {k: v.to_padded_tensor(0.0) if getattr(v, "is_nested", False) else v for k, v in self.items()}
        )


class Queue:
    """`transfer_queue`, as far as the trainer and its workers use it."""

    def __init__(self):
        self.columns = {}

    def kv_batch_get(self, keys, partition_id, select_fields=None):
        assert partition_id == "train" and keys == ["q0_0", "q0_1", "q1_0", "pad"]
        return Fields({name: self.columns[name] for name in select_fields if name in self.columns})


class Workers:
    """The actor's worker group: a scoring pass writes the log-probs of the whole sequences."""

    def __init__(self, queue):
        self.queue, self.level = queue, -1.0

    def compute_log_prob(self, batch):
        assert batch.extra_info["compute_loss"] is False
        self.queue.columns["log_probs"] = nested([[self.level] * (PROMPT + n) for n in RESPONSES])

    def update_actor(self, batch):
        self.level -= 0.5


def response_from_nested(tensor, mask):
    lengths, ends = mask.offsets().diff(), tensor.offsets()[1:]
    rows = [tensor.values()[end - n - 1 : end - 1] for n, end in zip(lengths, ends, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class PPOTrainer:
    """verl's v1 trainer without what it trains: the calls of one step in their order."""

    def __init__(self, config):
        self.config, self.global_steps = config, 0
        self.actor_rollout_wg = Workers(config.queue)

    def fit(self, steps):
        for _ in range(steps):
            self.global_steps += 1
            self.step()
            self.on_step_end()

    def step(self):
        queue = self.config.queue
        keys, tags = ["q0_0", "q0_1", "q1_0", "pad"], [{}, {}, {}, {"is_padding": True}]
        batch = SimpleNamespace(keys=keys, tags=tags, partition_id="train", extra_info={})
        mask = nested([[1.0] * n for n in RESPONSES])
        self.queue_columns = queue.columns
        queue.columns |= {
            "response_mask": mask,
            "uid": SimpleNamespace(tolist=lambda: ["q0", "q0", "q1", "q1"]),
        }
        queue.columns["old_log_probs"] = nested([[-1.0] * n for n in RESPONSES])
        queue.columns["advantages"] = nested([[a] * n for a, n in zip((1, -1, 0, 0), RESPONSES, strict=True)])
        queue.columns["rm_scores"] = nested(
            [[0.0] * (n - 1) + [r] for r, n in zip((1, 0, 0, 0), RESPONSES, strict=True)]
        )
        if self.config.trainer.critic_warmup <= self.global_steps:
            self._update_actor(batch, {})

    def _update_actor(self, batch, metrics):
        self.actor_rollout_wg.update_actor(batch)
        metrics["actor/grad_norm"] = 0.25
        return batch

    def on_step_end(self):
        self.ended = self.global_steps


class Renamed(PPOTrainer):
    """A trainer of another version: it updates the actor by another name."""

    def step(self):
        self.actor_rollout_wg.update_actor(None)


def module(name, **content):
    made = types.ModuleType(name)
    vars(made).update(content)
    return made


@pytest.fixture
def verl(monkeypatch):
    """The modules of verl that the callback imports, and the callback."""
    queue, registry = Queue(), {"sync": PPOTrainer, "renamed": Renamed}
    modules = {
        "verl": module("verl"),
        "verl.trainer": module("verl.trainer"),
        "verl.trainer.ppo": module("verl.trainer.ppo"),
        "verl.trainer.ppo.v1": module("verl.trainer.ppo.v1"),
        "verl.trainer.ppo.v1.trainer_base": module(
            "verl.trainer.ppo.v1.trainer_base", TRAINER_REGISTRY=registry
        ),
        "verl.workers": module("verl.workers"),
        "verl.workers.utils": module("verl.workers.utils"),
        "verl.workers.utils.padding": module(
            "verl.workers.utils.padding", response_from_nested=response_from_nested
        ),
        "transfer_queue": module("transfer_queue", kv_batch_get=queue.kv_batch_get),
    }
    for name, made in modules.items():
        monkeypatch.setitem(sys.modules, name, made)
        if "." in name:
            parent, _, own = name.rpartition(".")
            setattr(modules[parent], own, made)
    spec = importlib.util.spec_from_file_location("verl_callback", FILE)
    callback = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(callback)

    def config(mode, critic_warmup=0):
        trainer = SimpleNamespace(
            use_v1=True, critic_warmup=critic_warmup, v1=SimpleNamespace(trainer_mode=mode)
        )
        return SimpleNamespace(trainer=trainer, queue=queue)

    return SimpleNamespace(callback=callback, registry=registry, config=config)


def built(verl, config):
    """The trainer, as verl's task runner makes it."""
    return verl.registry[config.trainer.v1.trainer_mode](config)


@pytest.mark.slow
def test_the_trainer_that_verl_runs_posts_its_rows_and_says_so_after_the_first_step(verl, tmp_path, capsys):
    with serving(tmp_path) as server:
        config = verl.config("sync")
        with verl.callback.watching(config, server.url, "v1", spool_dir=str(tmp_path / "spool")):
            trainer = built(verl, config)
            trainer.fit(2)
        rows = httpx.get(f"{server.url}/v1/runs/v1/steps/2/trajectories", trust_env=False).json()
        steps = httpx.get(f"{server.url}/v1/runs/v1/steps", trust_env=False).json()
    assert capsys.readouterr().out == (
        f"likelihood: step 1 of run v1: 3 trajectories posted to {server.url}, stored\n"
    )
    assert trainer.ended == 2 and verl.registry["sync"] is PPOTrainer
    seen = {row["uid"]: row for row in rows}
    assert sorted(seen) == ["q0_0", "q0_1", "q1_0"]
    assert [seen[uid]["group"] for uid in sorted(seen)] == ["q0", "q0", "q1"]
    assert [seen[uid]["reward"] for uid in sorted(seen)] == [1.0, 0.0, 0.0]
    (action,) = seen["q0_1"]["actions"]
    assert (action["tokens"], action["logp_before"], action["logp_after"]) == (2, -2.0, -4.0)
    assert seen["q0_1"]["advantage"] == -1.0
    assert [step["metrics"]["grad_norm"] for step in steps] == [0.25, 0.25]


def test_a_trainer_whose_update_is_not_seen_ends_with_an_error_after_its_first_step(verl, tmp_path):
    config = verl.config("renamed")
    with pytest.raises(RuntimeError, match="step 1 ended and no update of the actor was seen"):
        with verl.callback.watching(config, "http://127.0.0.1:9", "v1", spool_dir=str(tmp_path / "spool")):
            built(verl, config).fit(5)
    assert verl.registry["renamed"] is Renamed


def test_a_training_without_a_watched_trainer_ends_with_an_error(verl, tmp_path):
    config = verl.config("sync")
    with pytest.raises(RuntimeError, match="the training ended and no update"):
        with verl.callback.watching(config, "http://127.0.0.1:9", "v1", spool_dir=str(tmp_path / "spool")):
            PPOTrainer(config).fit(1)
    with pytest.raises(RuntimeError, match="no trainer 'other'; it has renamed, sync"):
        with verl.callback.watching(
            verl.config("other"), "http://127.0.0.1:9", "v1", spool_dir=str(tmp_path / "s")
        ):
            pass


def test_the_critics_warm_up_is_no_missed_update(verl, tmp_path):
    with serving(tmp_path) as server:
        config = verl.config("sync", critic_warmup=3)
        with verl.callback.watching(config, server.url, "v1", spool_dir=str(tmp_path / "spool")) as watch:
            built(verl, config).fit(4)
        assert watch.rows == 6
