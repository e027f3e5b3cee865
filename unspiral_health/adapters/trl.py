"""TRL's GRPOTrainer, run with TRL 1.16: every optimiser step posted, and LLDS in the loss."""

from typing import Any

from unspiral_health import needs_torch  # noqa: F401

# isort: split
import torch

from unspiral_health.adapters import groups_of, last_of, wrap
from unspiral_health.adapters.hugging_face import MetricsCallback

KEYS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "rewards", "wrote")


class LikelihoodCallback(MetricsCallback):
    """Call `attach(trainer)` once the trainer exists."""

    def attach(self, trainer: Any) -> None:
        self.trainer = trainer
        self.scored = trainer._get_per_token_logps_and_entropies
        self.logps = last_of(trainer, "_get_per_token_logps_and_entropies")
        self.parts = last_of(trainer, "_calculate_rewards")  # [all rows, reward functions], NaN for None
        wrap(trainer, "_generate_and_score_completions", self.with_rewards)
        wrap(trainer, "_compute_loss", self.with_llds)

    def with_rewards(self, out: dict[str, Any], inputs: Any) -> dict[str, Any]:
        """TRL drops the rewards once it has the advantages: keep them with their rows."""
        rewards = (self.parts() * self.trainer.reward_weights.to(self.parts().device)).nansum(1)
        rewards[self.parts().isnan().all(1)] = torch.nan
        mine = rewards.view(-1, len(out["advantages"]))[self.trainer.accelerator.process_index]
        return out | {"rewards": mine, "wrote": out["completion_mask"] * out.get("tool_mask", 1)}

    def with_llds(self, loss: Any, model: Any, b: dict[str, Any]) -> Any:
        if self.llds is None or not model.training:
            return loss
        term = self.llds(self.logps()[0], b.get("old_per_token_logps"), b["advantages"], b["wrote"])
        for name, value in self.llds.metrics.items():
            self.trainer._metrics["train"][name].append(value)
        return loss + term / self.trainer.current_gradient_accumulation_steps

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parts = self.trainer._buffered_inputs  # the generation batch that the trainer steps through
        self.batch = {k: torch.cat([p[k] for p in parts]) for k in KEYS}
        self.before = self.score(self.batch)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        b = self.batch
        groups = groups_of(b["prompt_ids"], b["prompt_mask"])
        given: dict[str, Any] = {"rewards": b["rewards"], "batch": b, "score": self.score}
        self.run.update(state.global_step, b["wrote"], self.before, b["advantages"], groups, **given)
        self.run.confirm(state.global_step)

    @torch.no_grad()
    def score(self, b: dict[str, Any]) -> Any:
        """Log-probs [B, T] of the completions' tokens under the weights of now."""
        ids, mask = (torch.cat([b[f"prompt_{k}"], b[f"completion_{k}"]], 1) for k in ("ids", "mask"))
        rows = self.trainer.args.per_device_train_batch_size
        return self.scored(self.trainer.model, ids, mask, b["completion_ids"].size(1), batch_size=rows)[0]
