"""SkyRL, written for 0.3.0: LLDS as the policy loss `llds`, and a callback that posts every step."""

import copy
from typing import Any

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, register_policy_loss
from skyrl.train.utils.callbacks import TrainingCallback

from unspiral_health.adapters import groups_of
from unspiral_health.llds import LLDS
from unspiral_health.run import Run


def register(llds: LLDS, rows: int, base: str = "regular", name: str = "llds") -> None:
    """Make the policy loss `name`: SkyRL's loss `base`, and LLDS by the micro-batch's share of rows.

    rows: of a mini-batch, `policy_mini_batch_size * n_samples_per_prompt`; SkyRL adds up the losses of its
    micro-batches, and does not tell them how many there are.
    """
    plain = PolicyLossRegistry.get(base)

    @register_policy_loss(name)
    def with_llds(log_probs: Any, old: Any, advantages: Any, config: Any, loss_mask: Any = None, **more: Any):
        config = copy.copy(config)
        config.policy_loss_type = base
        loss, metrics = plain(log_probs, old, advantages, config, loss_mask=loss_mask, **more)
        term = llds(log_probs, old, advantages, loss_mask)
        return loss + len(log_probs) / rows * term, metrics | llds.metrics


class LikelihoodCallback(TrainingCallback):
    """`trainer.add_callback(LikelihoodCallback(...))`; options are those of `Run`. SkyRL has dropped rewards
    and uids by then: the sign of the advantage says which answers are right, the prompt which are a group."""

    def __init__(self, url: str | None = None, name: str | None = None, **options: Any):
        self.run = Run(url, name, trainer="skyrl", **options)

    def on_step_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        data = callback_input.batch
        width, own = data.metadata["response_length"], len(data) - data.metadata.get("pad_size", 0)
        rows = {k: data[k][:own] for k in ("sequences", "attention_mask")}

        def score(b: dict[str, Any]) -> Any:
            batch = TrainingInputBatch(b)
            batch.metadata = {"response_length": width}
            whole = pad_training_input_batch(batch, -len(batch) % trainer.dispatch.dp_size("policy"))
            whole.metadata = {"response_length": width}
            return trainer._execute_forward_pass("policy", whole, "logprobs", None)[: len(batch)]

        groups = groups_of(rows["sequences"][:, :-width], rows["attention_mask"][:, :-width])
        mask, old, advantages = (data[k][:own] for k in ("loss_mask", "action_log_probs", "advantages"))
        said = trainer.all_metrics | (callback_input.metrics or {})
        more: dict[str, Any] = {"metrics": said, "batch": rows, "score": score}
        self.run.update(callback_input.global_step, mask, old, advantages, groups, **more)
        self.run.confirm(callback_input.global_step)

    def on_train_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        self.run.close()
