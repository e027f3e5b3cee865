"""Likelihood tracking for verl: a wrapper around the trainer that it runs. Written against verl 0.9.1.

Start verl by this file in place of `python -m verl.trainer.main_ppo`, with the same overrides:

    unspiral serve likelihood
    python examples/verl_callback.py http://127.0.0.1:8100 my-run algorithm.adv_estimator=grpo ...

verl trains inside a Ray actor, so the trainer is wrapped there: the one of `trainer.v1.trainer_mode`, or,
with `trainer.use_v1=False`, the older RayPPOTrainer. After every actor update the batch is scored again,
one scoring pass per step. The right answers of five steps ago are scored too with the older trainer (the
lag probe); the v1 trainer clears them from its queue. The end of the first step says what was posted. A run
in which no update was seen ends with an error.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from services.likelihood.client import LikelihoodClient
from services.likelihood.metrics.padded import LagMemory, padded_records
from services.likelihood.metrics.verdicts import is_right
from services.likelihood.records import StepRecord

NAMES = {
    "actor/grad_norm": "grad_norm",
    "actor/entropy": "entropy",
    "actor/pg_clipfrac": "policy/clip_fraction",
    "actor/kl_loss": "kl/ref",
    "probe/lag": "probe/lag",
}
FIELDS = ["uid", "response_mask", "old_log_probs", "advantages", "rm_scores"]
DELIVERY_SECONDS = 30.0


class Watch:
    """What the wrapped trainer posts, and whether it was called."""

    def __init__(self, url: str, run: str, spool_dir: str, attempt: int, right_at: float):
        self.client = LikelihoodClient(url, spool_dir=spool_dir)
        self.run = run
        self.attempt = attempt
        self.right_at = right_at
        """The least reward of a right answer."""
        self.lag = LagMemory()
        self.rows = 0
        self.told = False

    def post(self, step: int, metrics: dict[str, Any], records: list) -> None:
        named = {NAMES[name]: float(np.mean(value)) for name, value in metrics.items() if name in NAMES}
        self.client.post_step(
            self.run, StepRecord(step=step, attempt=self.attempt, metrics=named, trajectories=records)
        )
        self.rows += len(records)

    def step_ended(self, step: int) -> None:
        """Say once what became of the first step's rows. Raises RuntimeError where there are none, or the
        service refused them."""
        if self.told:
            return
        self.told = True
        if not self.rows:
            raise RuntimeError(
                f"likelihood: step {step} ended and no update of the actor was seen; nothing was posted"
            )
        stored = self.client.flush(DELIVERY_SECONDS)
        if self.client.refused:
            raise RuntimeError(
                f"likelihood: {self.client.url} refused what step {step} posted; its log says why"
            )
        kept = "stored" if stored else "not stored yet: they wait in the spool folder"
        posted = f"{self.rows} trajectories posted to {self.client.url}, {kept}"
        print(f"likelihood: step {step} of run {self.run}: {posted}", flush=True)


def watched_v1(trainer: type, watch: Watch) -> type:
    """The v1 trainer's class, posting every update of the actor."""
    import transfer_queue as tq
    from verl.workers.utils.padding import response_from_nested

    class Watched(trainer):
        def _update_actor(self, batch: Any, metrics: dict) -> Any:
            batch = super()._update_actor(batch, metrics)
            data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=FIELDS)
            data = data.to_padded_tensor()
            after = self._scored_again(batch)
            own = np.array(
                [not tag.get("is_padding", False) for tag in batch.tags]
            )  # others fill up a mini-batch
            groups, uids = np.array(data["uid"].tolist(), object), np.array(batch.keys, object)
            rewards = data["rm_scores"].sum(-1)[own]
            records = padded_records(
                data["response_mask"][own], data["old_log_probs"][own], data["advantages"][own],
                list(groups[own]),
                after=after[own], rewards=rewards, uids=list(uids[own]),
                right=is_right(rewards.tolist(), watch.right_at),
            )  # fmt: skip
            watch.post(self.global_steps, metrics, records)
            return batch

        def _scored_again(self, batch: Any) -> Any:
            """Log-probs [B, T] of the responses under the weights of now."""
            batch.extra_info.update({"calculate_entropy": False, "compute_loss": False})
            self.actor_rollout_wg.compute_log_prob(batch)
            fields = ["log_probs", "response_mask"]
            data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
            return response_from_nested(data["log_probs"], data["response_mask"]).to_padded_tensor(0.0)

        def on_step_end(self) -> None:
            super().on_step_end()
            if self.config.trainer.critic_warmup <= self.global_steps:  # before, the actor is not updated
                watch.step_ended(self.global_steps)

    return Watched


def watched_v0(trainer: type, watch: Watch) -> type:
    """RayPPOTrainer, posting every update of the actor."""
    from verl.protocol import pad_dataproto_to_divisor, unpad_dataproto

    class Watched(trainer):
        def _update_actor(self, batch: Any) -> Any:
            output = super()._update_actor(batch)
            data, mask, before = batch.batch, batch.batch["response_mask"], batch.batch["old_log_probs"]
            metrics = dict(output.meta_info["metrics"])
            rewards = data["token_level_scores"].sum(-1)
            advantages = data["advantages"]
            right = is_right(rewards.tolist(), watch.right_at)
            lag = watch.lag.probe(
                {"data": batch},
                mask,
                before,
                advantages,
                lambda kept: self._scored(kept["data"]),
                right=right,
            )
            records = padded_records(
                mask, before, advantages, list(batch.non_tensor_batch["uid"]),
                after=self._scored(batch), rewards=rewards, right=right,
            )  # fmt: skip
            watch.post(self.global_steps, metrics if lag is None else metrics | {"probe/lag": lag}, records)
            watch.step_ended(self.global_steps)
            return output

        def _scored(self, batch: Any) -> Any:
            """Log-probs [B, T] under the current weights; the batch is padded to whole rows per worker."""
            whole, added = pad_dataproto_to_divisor(batch, self.actor_rollout_wg.world_size)
            scored = self._compute_old_log_prob(whole)[0]
            return unpad_dataproto(scored, added).batch["old_log_probs"]

    return Watched


@contextlib.contextmanager
def watching(
    config: Any,
    url: str,
    run: str,
    spool_dir: str = ".likelihood-spool",
    attempt: int = 0,
    right_at: float = 1.0,
) -> Iterator[Watch]:
    """Within it, the trainer that verl builds from `config` posts its updates. Raises RuntimeError at the end
    where none was seen. right_at: the least reward of a right answer."""
    if config.trainer.use_v1:
        from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY as places

        name, wrap = config.trainer.v1.trainer_mode, watched_v1
    else:
        from verl.trainer import main_ppo_v0

        places, name, wrap = vars(main_ppo_v0), "RayPPOTrainer", watched_v0
    if name not in places:
        raise RuntimeError(
            f"likelihood: verl has no trainer {name!r}; it has {', '.join(sorted(map(str, places)))}"
        )
    watch = Watch(url, run, spool_dir, attempt, right_at)
    plain = places[name]
    places[name] = wrap(plain, watch)
    try:
        yield watch
    finally:
        places[name] = plain
        watch.client.close()
    if not watch.rows:
        raise RuntimeError(
            "likelihood: the training ended and no update of the actor was seen; nothing was posted"
        )


def watched_runner(runner: Any, url: str, run: str) -> Any:
    """verl's actor that trains, watching the trainer in its own process."""
    import ray

    class Watched(runner.__ray_metadata__.modified_class):
        def run(self, config: Any) -> None:
            with watching(config, url, run):
                super().run(config)

    return ray.remote(Watched)


def main(url: str, run: str, *overrides: str) -> None:
    """verl's own command, with its task runners wrapped."""
    from verl.trainer import main_ppo, main_ppo_v0

    main_ppo.TaskRunnerV1 = watched_runner(main_ppo.TaskRunnerV1, url, run)
    main_ppo_v0.TaskRunner = watched_runner(main_ppo_v0.TaskRunner, url, run)
    sys.argv = [sys.argv[0], *overrides]
    main_ppo.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
