"""OpenRLHF, written for 0.11.2: LLDS around the policy loss, and each fit of a policy actor posted.

`python -m unspiral_health.adapters.launch openrlhf` starts OpenRLHF's own command with both.
"""

from typing import Any

from unspiral_health.llds import LLDS  # isort: skip  # before torch, whose lack it tells
import torch

from unspiral_health.adapters import stable_name
from unspiral_health.run import Run


class WithLLDS(torch.nn.Module):
    """OpenRLHF's PolicyLoss, and LLDS by the micro-batch's share of tokens."""

    def __init__(self, policy_loss: torch.nn.Module, llds: LLDS):
        super().__init__()
        self.policy_loss = policy_loss
        self.llds = llds

    def forward(self, logp: Any, old: Any, advantages: Any, action_mask: Any, **more: Any) -> tuple:
        loss, *rest = self.policy_loss(logp, old, advantages, action_mask=action_mask, **more)
        term = self.llds(logp, old, advantages, action_mask)
        tokens = more.get("batch_num_tokens")
        share = 1.0 if tokens is None else action_mask.sum() * more.get("dp_size", 1) / tokens
        return (loss + share * term, *rest)


def watched(actor: type, llds: LLDS, url: str | None = None, name: str | None = None) -> type:
    """OpenRLHF's policy actor, adding LLDS to its loss and posting its own rows after each fit."""
    from openrlhf.trainer.ppo_utils.experience import make_experience_batch

    class Watched(actor):
        unspiral: Run | None = None
        fits = 0

        def fit(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            if self.unspiral is None:
                self.unspiral = Run(url, name, trainer="openrlhf", rank=torch.distributed.get_rank())
                self.trainer.actor_loss_fn = WithLLDS(self.trainer.actor_loss_fn, llds)
            items = list(self.trainer.replay_buffer.items)
            status = super().fit(*args, **kwargs) | llds.metrics
            self.fits += 1
            e = make_experience_batch(items)
            rows = {k: getattr(e, k) for k in ("sequences", "action_mask", "attention_mask")}
            lag = {"batch": rows, "score": self.scored} if self.strategy.args.ds.zero_stage < 3 else {}
            more = {"rewards": e.rewards, "after": self.scored(rows), "metrics": status, **lag}
            groups = [stable_name(p) for p in e.prompts]
            self.unspiral.update(self.fits, e.action_mask, e.action_log_probs, e.advantages, groups, **more)
            self.unspiral.confirm(self.fits)
            return status

        def scored(self, rows: dict[str, Any]) -> Any:
            """Log-probs [B, A] under the weights of now."""
            parts = torch.arange(len(rows["sequences"])).split(self.trainer.micro_train_batch_size)
            return torch.cat([self.forward(**{k: v[part] for k, v in rows.items()}) for part in parts])

    return Watched
