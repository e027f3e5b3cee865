"""Settings in groups that share a rule on resume; `rules.py` applies them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from trainer.config.schema import Config, leaf_keys

Change = Literal["free", "warns", "on request", "refused"]


class Group(NamedTuple):
    """Keys of the configuration that share a rule. `why` says what a change does to the run."""

    change: Change
    keys: tuple[str, ...]
    why: str


def _keys(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)


GROUPS = (
    Group(
        "refused",
        ("learner.lora.rank", "learner.lora.targets"),
        "the adapters of the checkpoint have another shape",
    ),
    Group(
        "refused", ("learner.lora.alpha",), "what the adapters have learnt would be scaled by another factor"
    ),
    Group(
        "on request",
        ("model.path",),
        "another config.json, tokenizer or (with LoRA or a KL term) other base weights are another policy; a "
        "folder that "
        "was moved is the same one",
    ),
    Group(
        "on request",
        ("rollout.template", "rollout.reading", "rollout.bos", "rollout.thoughts", "rollout.tools"),
        "prompts and tags would be others than those that the policy was trained on",
    ),
    Group(
        "on request",
        ("reward.kind", "reward.right_at"),
        "rewards before and after mean different things, to the monitor also",
    ),
    Group(
        "on request",
        ("seed",),
        "the order of the prompts and all sampling would be others; on request a new pass begins",
    ),
    Group(
        "on request",
        ("data.shuffle", "data.weights"),
        "the order of the prompts would be another; on request a new pass begins",
    ),
    Group(
        "on request",
        ("data.train",),
        "the questions, or their golden answers, would be others; on request a new pass begins, or the same "
        "one goes on by the new answers. A file that was moved is the same one",
    ),
    Group(
        "warns",
        (
            "algorithm.loss",
            "algorithm.advantage",
            "algorithm.dr_grpo_tokens",
            "algorithm.overlong.tokens",
            "algorithm.overlong.penalty",
        ),
        "another objective: losses, gradient norms and rewards before and after cannot be compared",
    ),
    Group(
        "warns",
        (
            "rollout.prompts_per_step",
            "rollout.group_size",
            "rollout.temperature",
            "rollout.max_turns",
            "rollout.max_response_tokens",
            "rollout.max_obs_tokens",
            "rollout.max_model_tokens",
            "rollout.topk",
            "retriever.index",
            "retriever.corpus",
            "retriever.null_is_empty",
            "retriever.text_key",
            "retriever.title_key",
            "retriever.id_key",
        ),
        "the task or the sample is another: rewards, lengths and likelihoods before and after cannot be "
        "compared",
    ),
    Group(
        "warns",
        ("rollout.engine", "rollout.deterministic", "learner.dtype"),
        "other rounding: the run is no longer the one that an undisturbed run would have been",
    ),
    Group("warns", ("learner.betas",), "Adam's moments were gathered under the old ones"),
    Group(
        "warns",
        (
            *_keys("data", "eval", "null_is_empty", "question_key", "answer_key", "source_key", "id_key"),
            "evaluation.limit",
        ),
        "scores before and after are of other questions",
    ),
    Group(
        "warns",
        (
            "evaluation.retriever.index",
            "evaluation.retriever.corpus",
            "evaluation.retriever.null_is_empty",
            "evaluation.retriever.text_key",
            "evaluation.retriever.title_key",
            "evaluation.retriever.id_key",
        ),
        "scores before and after are with other passages",
    ),
    Group(
        "warns",
        ("store.url",),
        "earlier steps stay in the old store, so the lag probe is missing until it has new ones",
    ),
    Group(
        "free",
        (
            "learner.lr",
            "learner.warmup_steps",
            "learner.warmup_batches",
            *_keys("learner", "warmup_share", "schedule", "schedule_floor"),
            "learner.match_kl",
            "learner.weight_decay",
            "learner.grad_clip",
            "learner.minibatches_per_batch",
            "learner.epochs",
            "algorithm.clip_low",
            "algorithm.clip_high",
            "algorithm.kl",
            "algorithm.entropy",
            "algorithm.dynamic_sampling",
            "algorithm.negatives",
            *_keys("algorithm", "cov_share", "cov_low", "cov_high", "cov_kl"),
            *_keys("algorithm.importance", "mode", "cap", "geometric_band", "token_band", "outlier_band"),
            *_keys("algorithm.batch_kl", "weight", "over"),
            *_keys("algorithm.supervised", "every", "data", "updates", "rows", "lr_scale"),
            *_keys("algorithm.llds", "lambda", "form", "ratio_below", "gate", "denominator", "preserve"),
            *_keys("algorithm.llds", "anchor", "snapshot_every", "min_drop"),
            *_keys("algorithm.llds", "answer_weight", "answer_lambda"),
            "rollout.max_staleness",
            "data.keep_columns",
        ),
        "holds from the next step on",
    ),
    Group(
        "free",
        (
            "learner.ranks",
            "learner.zero_stage",
            "learner.tokens_per_microbatch",
            "learner.packing",
            "learner.logit_chunk_tokens",
            "learner.gradient_checkpointing",
            "learner.compile",
            "learner.offload_optimizer",
            "learner.start_timeout_seconds",
            "learner.step_timeout_seconds",
            "rollout.workers",
            "rollout.max_prompt_tokens",
            "rollout.top_p",
            "rollout.top_k",
            "rollout.trajectory_timeout_seconds",
            "rollout.tool_timeout_seconds",
            "rollout.start_timeout_seconds",
            "rollout.dtype",
            "rollout.head_dtype",
            "rollout.gpu_memory_utilization",
            "rollout.kv_cache_gib",
            "rollout.tensor_parallel",
            "rollout.workers_per_gpu",
            "rollout.compile",
            "rollout.share_gpus",
            "weight_sync.backend",
            "weight_sync.timeout_seconds",
            "weight_sync.bucket_mib",
        ),
        "how it is computed, not what",
    ),
    Group(
        "free",
        (
            "run.name",
            "run.dir",
            "data.skip_bad",
            "retriever.url",
            "retriever.skip_bad",
            "retriever.concurrency",
            "retriever.timeout_seconds",
            "retriever.start_timeout_seconds",
            "evaluation.sampled",
            "evaluation.retriever.url",
            "evaluation.retriever.skip_bad",
            "evaluation.retriever.concurrency",
            "evaluation.retriever.timeout_seconds",
            "evaluation.retriever.start_timeout_seconds",
            "store.token_steps",
            "store.trajectory_groups",
            "store.trajectory_steps",
            "store.probe_trajectories",
            *_keys("reward", "timeout_seconds", "concurrency"),
            *_keys("tracking", "wandb", "tensorboard", "mlflow"),
            "control.enabled",
            "control.host",
            "control.port",
            "trainer.steps",
            "trainer.max_minutes",
            "trainer.metrics",
            "trainer.eval_every",
            "trainer.eval_at_ends",
            "trainer.checkpoint_every",
            "trainer.keep_checkpoints",
            *_keys("trainer", "keep_best", "best_by", "patience"),
            "trainer.max_restores",
            *_keys("trainer", "stop_grace_seconds", "stall_timeout_seconds"),
        ),
        "where and for how long",
    ),
    Group(
        "free",
        (
            "probe.lag_steps",
            "probe.lag_size",
            "probe.fixed_size",
            "probe.displacement_size",
            "probe.every",
            "monitor.action",
            *(key for key in leaf_keys(Config) if key.startswith("monitor.rules.")),
        ),
        "what is watched; a fixed probe that is full stays as it is",
    ),
)
