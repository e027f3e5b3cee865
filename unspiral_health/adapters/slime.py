"""slime, written for its sources of November 2026: LLDS in its custom loss, and every rollout posted.

    --loss-type custom_loss --custom-loss-function-path unspiral_health.adapters.slime.policy_loss_with_llds
    --custom-megatron-init-path unspiral_health.adapters.slime.watch

The variables UNSPIRAL_LIKELIHOOD_URL, UNSPIRAL_RUN and UNSPIRAL_LLDS_LAMBDA say where to, and how strong.
"""

from typing import Any

from services.common.errors import UserError
from unspiral_health.adapters import padded, wrap
from unspiral_health.llds import LLDS
from unspiral_health.run import Run

llds = LLDS.from_environment()


def policy_loss_with_llds(args: Any, batch: Any, logits: Any, sum_of_sample_mean: Any) -> tuple[Any, dict]:
    """slime's policy loss and LLDS. slime divides what this returns by the step's samples, or its tokens."""
    if args.context_parallel_size > 1:
        raise UserError("LLDS: context_parallel_size: expected 1, so that an action is not cut in two")
    from slime.backends.megatron_utils import loss as slime

    value, said = slime.policy_loss_function(args, batch, logits, sum_of_sample_mean)
    names = ("unconcat_tokens", "total_lengths", "response_lengths")
    now = slime.get_log_probs_and_entropy(logits, args=args, **{k: batch[k] for k in names})[1]
    old = batch.get("log_probs")  # Megatron's own; the sampler's would take mismatch for a drop
    mask, advantages = padded(batch["loss_masks"]), padded(batch["advantages"])
    term = llds(padded(now["log_probs"]), padded(old) if old else None, advantages, mask)
    share = mask.sum() if args.calculate_per_token_loss else len(mask)
    return value + share * term, said | {k: logits.new_tensor(v * share) for k, v in llds.metrics.items()}


def watch(args: Any) -> None:
    """Called in each process once Megatron is up: post the rows of every rollout after its training."""
    from megatron.core import mpu
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor, get_data_iterator

    first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.is_pipeline_last_stage()
    run = Run(trainer="slime", rank=mpu.get_data_parallel_rank()) if first else None

    def after(result: Any, actor: Any, rollout_id: int, data: dict[str, Any], **more: Any) -> Any:
        new = actor.compute_log_prob(get_data_iterator(data), data["num_microbatches"])
        if run is None:
            return result
        mask, old, advantages = (padded(data[k]) for k in ("loss_masks", "log_probs", "advantages"))
        groups = [str(index // args.n_samples_per_prompt) for index in data["sample_indices"]]
        whole = data["raw_reward"]  # of all processes; `partition`, where slime keeps it, says which are ours
        rewards = [whole[i] for i in data["partition"]] if "partition" in data else None
        metrics = {"rollout/raw_reward": whole, **llds.metrics}
        given = {"rewards": rewards, "after": padded(new["log_probs"]), "metrics": metrics}
        run.update(rollout_id, mask, old, advantages, groups, **given)
        run.confirm(rollout_id)
        return result

    wrap(MegatronTrainRayActor, "train_actor", after)
