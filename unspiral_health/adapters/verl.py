"""verl, written for 0.9.1: LLDS as the policy loss `llds`, and every update of the actor posted.

`python -m unspiral_health.adapters.launch verl` starts verl's own command with both.
"""

from typing import Any

from unspiral_health import needs_torch  # noqa: F401

# isort: split
import torch

from unspiral_health.llds import LLDS
from unspiral_health.run import Run

FIELDS = ["response_mask", "old_log_probs", "advantages", "uid", "rm_scores"]


def register(llds: LLDS, base: str = "vanilla", name: str = "llds") -> None:
    """Make the policy loss `name`: verl's loss `base`, and LLDS by the micro-batch's share of tokens."""
    from verl.trainer.ppo import core_algos as verl

    plain = verl.get_policy_loss_fn(base)

    @verl.register_policy_loss(name)
    def loss(
        old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, *more: Any, **config: Any
    ):
        value, metrics = plain(old_log_prob, log_prob, advantages, response_mask, *more, **config)
        term = llds(log_prob, old_log_prob, advantages, response_mask)
        step = config["config"].global_batch_info
        share = verl.agg_loss(torch.ones_like(log_prob), response_mask, "token-mean", **step)
        return value + share * term, metrics | {f"actor/{k}": v for k, v in llds.metrics.items()}


def watched(trainer: type, run: Run) -> type:
    """verl's v1 trainer, scoring and posting its batch after every update of the actor."""
    import transfer_queue as tq
    from verl.workers.utils.padding import response_from_nested

    class Watched(trainer):
        def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
            batch = super()._update_actor(batch, metrics)
            where = {"keys": batch.keys, "partition_id": batch.partition_id}
            data = tq.kv_batch_get(**where, select_fields=FIELDS).to_padded_tensor()
            batch.extra_info.update({"calculate_entropy": False, "compute_loss": False})
            self.actor_rollout_wg.compute_log_prob(batch)
            new = tq.kv_batch_get(**where, select_fields=["log_probs", "response_mask"])
            after = response_from_nested(new["log_probs"], new["response_mask"]).to_padded_tensor(0.0)
            own = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
            groups = [data["uid"].tolist()[i] for i in own]
            mask, before, advantages = (data[name][own] for name in FIELDS[:3])
            more = {"rewards": data["rm_scores"].sum(-1)[own], "after": after[own], "metrics": metrics}
            run.update(self.global_steps, mask, before, advantages, groups, **more)
            run.confirm(self.global_steps)
            return batch

    return Watched
