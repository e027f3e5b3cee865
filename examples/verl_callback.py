"""Likelihood tracking for verl: one mix-in around `RayPPOTrainer`. Written against verl 0.9.1.

In the process that builds the trainer (verl's TaskRunner), before it does:

    import verl.trainer.main_ppo_v0 as main
    from verl_callback import watched
    main.RayPPOTrainer = watched(main.RayPPOTrainer, "http://127.0.0.1:8100", run="my-run")     # unspiral serve likelihood

After every actor update the batch is scored again, and so are the right answers of five steps ago: two scoring passes a step.
"""

from __future__ import annotations

import numpy as np
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto

from services.likelihood.client import LikelihoodClient
from services.likelihood.metrics.padded import LagMemory, padded_records
from services.likelihood.metrics.verdicts import is_right
from services.likelihood.records import StepRecord

NAMES = {
    "actor/grad_norm": "grad_norm",
    "actor/entropy": "entropy",
    "actor/pg_clipfrac": "policy/clip_fraction",
    "actor/kl_loss": "kl/ref",
}


def watched(
    trainer_class: type,
    url: str,
    run: str,
    *,
    spool_dir: str = ".likelihood-spool",
    attempt: int = 0,
    right_at: float = 1.0,
) -> type:
    """The trainer class, posting every actor update to a likelihood service. right_at: the least reward of a
    right answer."""

    class Watched(trainer_class):
        client, lag = LikelihoodClient(url, spool_dir=spool_dir), LagMemory()

        def _update_actor(self, batch: DataProto) -> DataProto:
            output = super()._update_actor(batch)
            data, mask, before = batch.batch, batch.batch["response_mask"], batch.batch["old_log_probs"]
            reported = output.meta_info["metrics"]
            metrics = {NAMES[k]: float(np.mean(v)) for k, v in reported.items() if k in NAMES}
            rewards = data["token_level_scores"].sum(-1)
            advantages = data["advantages"]
            right = is_right(rewards.tolist(), right_at)
            lag = self.lag.probe(
                {"data": batch},
                mask,
                before,
                advantages,
                lambda kept: self._scored(kept["data"]),
                right=right,
            )
            records = padded_records(
                mask, before, advantages, list(batch.non_tensor_batch["uid"]), after=self._scored(batch), rewards=rewards, right=right
            )  # fmt: skip
            if lag is not None:
                metrics["probe/lag"] = lag
            self.client.post_step(
                run,
                StepRecord(step=self.global_steps, attempt=attempt, metrics=metrics, trajectories=records),
            )
            return output

        def _scored(self, batch: DataProto):
            """Log-probs [B, T] under the weights of now; padded to whole rows for each worker and cut again."""
            whole, added = pad_dataproto_to_divisor(batch, self.actor_rollout_wg.world_size)
            scored = self._compute_old_log_prob(whole)[0]
            return unpad_dataproto(scored, added).batch["old_log_probs"]

    return Watched
