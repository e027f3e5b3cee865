"""The losses of other trainers, with LLDS in them by our adapters: the trainers' own code where it is
installed (`make test-adapters`), otherwise stand-ins after their public interfaces.

UNSPIRAL_REAL_TRAINERS=1 makes a missing trainer an error. slime has no wheel: it is always a stand-in.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import types
import typing
from collections import defaultdict
from types import SimpleNamespace

import torch

REAL = os.environ.get("UNSPIRAL_REAL_TRAINERS") == "1"
VERSIONS = {"verl": "0.9.1", "openrlhf": "0.11.2", "skyrl": "0.3.0", "trl": "1.16.0"}
"""Against which the adapters are written."""
ROWS_OF_STEP = 8
"""Rows of one optimiser step in these tests."""


def installed(trainer):
    """Whether the trainer's own code is there. Raises AssertionError where it must be, and is not."""
    found = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions(name=trainer)}
    if REAL:
        assert found.get(trainer) == VERSIONS[trainer], f"{trainer}: {found or 'not installed'}"
    return trainer in found


def module(monkeypatch, name, **content):
    """A module by its dotted name, with the packages around it."""
    parts = name.split(".")
    for n in range(1, len(parts)):
        if ".".join(parts[:n]) not in sys.modules:
            package = types.ModuleType(".".join(parts[:n]))
            package.__path__ = []
            monkeypatch.setitem(sys.modules, package.__name__, package)
    made = types.ModuleType(name)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)
    if len(parts) > 1:
        monkeypatch.setattr(sys.modules[name.rpartition(".")[0]], parts[-1], made, raising=False)
    return made


def clipped(logp, old, advantages, mask):
    """A policy loss [B, T], of any trainer."""
    ratio = (logp - old).exp()
    advantages = advantages if advantages.ndim == 2 else advantages[:, None]
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return torch.where(mask > 0.5, loss, 0.0)


def verl(monkeypatch, llds):
    """(loss without LLDS, with LLDS): functions of logp, old, advantages and mask, for the rows of a step or
    a part of them."""
    if not installed("verl"):
        registry = {}

        def agg_loss(matrix, mask, mode, dp_size=1, batch_num_tokens=None, **more):
            assert mode == "token-mean"
            return (matrix * mask).sum() / (batch_num_tokens or mask.sum()) * dp_size

        def vanilla(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, **more):
            loss = clipped(log_prob, old_log_prob, advantages, response_mask)
            info = config.global_batch_info
            return agg_loss(loss, response_mask, loss_agg_mode, **info), {"actor/ppo_kl": 0.0}

        registry["vanilla"] = vanilla
        module(
            monkeypatch,
            "verl.trainer.ppo.core_algos",
            get_policy_loss_fn=registry.__getitem__,
            register_policy_loss=lambda name: lambda f: registry.setdefault(name, f),
            agg_loss=agg_loss,
        )
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    adapter = importlib.import_module("unspiral_health.adapters.verl")
    name = f"llds-{id(llds)}"
    adapter.register(llds, name=name)
    if installed("verl"):
        config = importlib.import_module("verl.workers.config").FSDPActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=ROWS_OF_STEP
        )
    else:
        config = SimpleNamespace(global_batch_info={})

    def loss(which):
        def of(logp, old, advantages, mask, tokens=None):
            wide = advantages[:, None] * mask  # verl's are one value per token, 0 outside the mask
            config.global_batch_info.update(
                dp_size=1, batch_num_tokens=tokens, global_batch_size=ROWS_OF_STEP
            )
            given = {"old_log_prob": old, "log_prob": logp, "advantages": wide, "response_mask": mask}
            more = {"loss_agg_mode": "token-mean", "config": config, "rollout_is_weights": None}
            value, metrics = core.get_policy_loss_fn(which)(**given, **more)
            return value, metrics

        return of

    return loss("vanilla"), loss(name)


def openrlhf(monkeypatch, llds):
    adapter = importlib.import_module("unspiral_health.adapters.openrlhf")
    if installed("openrlhf"):
        # The package itself wants flash-attention; its losses do not.
        place = importlib.util.find_spec("openrlhf").submodule_search_locations[0]
        package = types.ModuleType("openrlhf.models")
        package.__path__ = [f"{place}/models"]
        monkeypatch.setitem(sys.modules, "openrlhf.models", package)
        policy = importlib.import_module("openrlhf.models.loss").PolicyLoss()
    else:

        class PolicyLoss(torch.nn.Module):
            def forward(self, logp, old, advantages, action_mask=None, rollout_log_probs=None, **norm):
                loss = clipped(logp, old, advantages, action_mask)
                tokens = norm.get("batch_num_tokens")
                loss = loss.sum() / (action_mask.sum() if tokens is None else tokens) * norm.get("dp_size", 1)
                return loss, torch.zeros(()), torch.zeros(()), None, None

        policy = PolicyLoss()

    def loss(of):
        def call(logp, old, advantages, mask, tokens=None):
            info = (
                {} if tokens is None else {"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": 8}
            )
            wide = advantages[:, None] * mask
            out = of(logp, old, wide, action_mask=mask, rollout_log_probs=None, **info)
            assert len(out) == 5
            return out[0], llds.metrics

        return call

    return loss(policy), loss(adapter.WithLLDS(policy, llds))


def skyrl(monkeypatch, llds):
    if installed("skyrl"):
        if sys.version_info < (3, 12):  # SkyRL is for 3.12, where pydantic takes the standard one
            import typing_extensions

            monkeypatch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
        config = importlib.import_module("skyrl.train.config").AlgorithmConfig()
    else:
        registry = {}
        config = SimpleNamespace(policy_loss_type="regular")

        class Registry:
            get = staticmethod(lambda name: registry[name])

        def regular(logp, old, advantages, config, loss_mask=None, rollout_logprobs=None):
            assert config.policy_loss_type == "regular"
            return clipped(logp, old, advantages, loss_mask).sum(), {"clip_ratio": 0.0}

        registry["regular"] = regular
        where = "skyrl.backends.skyrl_train"
        module(
            monkeypatch,
            f"{where}.utils.ppo_utils",
            PolicyLossRegistry=Registry,
            register_policy_loss=lambda name: lambda f: registry.setdefault(name, f),
        )
        module(
            monkeypatch, f"{where}.training_batch", TrainingInputBatch=Rows, pad_training_input_batch=padded
        )
        callbacks = SimpleNamespace(TrainingCallback=object)
        module(monkeypatch, "skyrl.train.utils.callbacks", **vars(callbacks))
    monkeypatch.delitem(sys.modules, "unspiral_health.adapters.skyrl", raising=False)
    adapter = importlib.import_module("unspiral_health.adapters.skyrl")
    name = f"llds-{id(llds)}"
    adapter.register(llds, rows=ROWS_OF_STEP, name=name)

    def loss(which):
        def of(logp, old, advantages, mask, tokens=None):
            scaled = advantages[:, None] * mask / (mask.sum() if tokens is None else tokens)
            set_to = copy_with(config, which)
            return adapter.PolicyLossRegistry.get(which)(
                logp, old, scaled, config=set_to, loss_mask=mask, rollout_logprobs=None
            )

        return of

    return loss("regular"), loss(name)


def copy_with(config, loss):
    if dataclasses.is_dataclass(config):
        return dataclasses.replace(config, policy_loss_type=loss)
    return SimpleNamespace(policy_loss_type=loss)


class Rows(dict):
    """SkyRL's batch, as far as the adapter uses it."""

    metadata = None

    def __len__(self):
        return len(next(iter(self.values())))


def padded(batch, size):
    out = Rows({k: torch.cat([v, v[:1].expand(size, *v.shape[1:])]) for k, v in batch.items()})
    out.metadata = {"pad_size": size}
    return out


def slime(monkeypatch, llds):
    """Losses and batches are lists of one tensor per sample, and logits [1, T, V] of all of them."""

    def scored(logits, *, args, unconcat_tokens, total_lengths, response_lengths, **more):
        return None, {"log_probs": [*logits[0, :, 0].split(response_lengths)]}

    def policy_loss(args, batch, logits, sum_of_sample_mean):
        now = torch.cat(scored(logits, args=args, **picked(batch))[1]["log_probs"])
        ratio = (now - torch.cat(batch["log_probs"])).exp()
        loss = sum_of_sample_mean(-ratio * torch.cat(batch["advantages"]))
        return loss, {"pg_loss": loss.detach()}

    def picked(batch):
        return {k: batch[k] for k in ("unconcat_tokens", "total_lengths", "response_lengths")}

    place = "slime.backends.megatron_utils"
    module(monkeypatch, f"{place}.loss", get_log_probs_and_entropy=scored, policy_loss_function=policy_loss)
    adapter = importlib.import_module("unspiral_health.adapters.slime")
    monkeypatch.setattr(adapter, "llds", llds)
    plain = sys.modules[f"{place}.loss"].policy_loss_function
    args = SimpleNamespace(context_parallel_size=1, calculate_per_token_loss=False)

    def loss(of):
        def call(logp, old, advantages, mask, tokens=None):
            rows, width = logp.shape
            batch = {
                "unconcat_tokens": [torch.zeros(width)] * rows,
                "total_lengths": [width] * rows,
                "response_lengths": [width] * rows,
                "loss_masks": [*mask],
                "log_probs": [*old],
                "advantages": [a.expand(width) for a in advantages],
            }

            def sum_of_sample_mean(x):
                return sum(
                    (r * m).sum() / m.sum().clamp(min=1) for r, m in zip(x.split(width), mask, strict=True)
                )

            value, said = of(args, batch, logp.reshape(1, -1, 1), sum_of_sample_mean)
            return value / ROWS_OF_STEP, said  # what slime's loss_function does with it

        return call

    return loss(plain), loss(adapter.policy_loss_with_llds)


def trl(monkeypatch, llds):
    """GRPOTrainer's own methods on an object without a model, or stand-ins of the same names."""
    if not (installed("trl") or importlib.util.find_spec("transformers")):
        module(monkeypatch, "transformers", TrainerCallback=object)
    adapter = importlib.import_module("unspiral_health.adapters.trl")

    class Trainer:
        current_gradient_accumulation_steps = 1

        def __init__(self):
            self._metrics = {"train": defaultdict(list)}

        def _calculate_rewards(self):
            raise NotImplementedError

        def _generate_and_score_completions(self, inputs):
            raise NotImplementedError

        def _get_per_token_logps_and_entropies(self, logp):
            return logp, None, None

        def _compute_loss(self, model, inputs):
            logp = self._get_per_token_logps_and_entropies(inputs["logp"])[0]
            old = inputs["old_per_token_logps"]
            loss = clipped(logp, old, inputs["advantages"], inputs["completion_mask"])
            return loss.sum() / inputs["completion_mask"].sum()

    def loss(attached):
        trainer = Trainer()
        if attached:
            adapter.LikelihoodCallback("http://127.0.0.1:9", "r", llds=llds).attach(trainer)

        def of(logp, old, advantages, mask, tokens=None):
            trainer.current_gradient_accumulation_steps = ROWS_OF_STEP / len(logp)
            given = {"logp": logp, "old_per_token_logps": old, "advantages": advantages}
            model = SimpleNamespace(training=True)
            value = trainer._compute_loss(model, given | {"completion_mask": mask, "wrote": mask})
            return value, dict(trainer._metrics["train"])

        return of

    return loss(False), loss(True)


TRAINERS = {"verl": verl, "trl": trl, "openrlhf": openrlhf, "skyrl": skyrl, "slime": slime}
