"""Names that users of verl, TRL, OpenRLHF and Search-R1 type, and the keys that mean the same here. They are
guesses for a message that refuses the name; no run takes them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from services.common.names import nearest

MOST = 3
"""Keys that are named at most."""

ALIASES: dict[str, tuple[str, ...]] = {
    "answer_key": ("data.answer_key",),
    "question_key": ("data.question_key",),
    "id_key": ("data.id_key", "retriever.id_key"),
    "input_key": ("data.question_key",),
    "label_key": ("data.answer_key",),
    "reward_fn_key": ("data.source_key",),
    "source_key": ("data.source_key",),
    "actor_learning_rate": ("learner.lr",),
    "adv_estimator": ("algorithm.advantage",),
    "advantage_estimator": ("algorithm.advantage",),
    "base_model": ("model.path",),
    "batch_size": ("rollout.prompts_per_step",),
    "beta": ("algorithm.kl",),
    "clip_ratio": ("algorithm.clip_low", "algorithm.clip_high"),
    "clip_ratio_high": ("algorithm.clip_high",),
    "clip_ratio_low": ("algorithm.clip_low",),
    "clip_eps": ("algorithm.clip_low", "algorithm.clip_high"),
    "cliprange": ("algorithm.clip_low", "algorithm.clip_high"),
    "corpus_path": ("retriever.corpus",),
    "default_local_dir": ("run.dir",),
    "entropy_coeff": ("algorithm.entropy",),
    "epsilon": ("algorithm.clip_low",),
    "epsilon_high": ("algorithm.clip_high",),
    "eval_steps": ("trainer.eval_every",),
    "experiment_name": ("run.name",),
    "gradient_accumulation_steps": ("learner.tokens_per_microbatch",),
    "index_path": ("retriever.index",),
    "init_kl_coef": ("algorithm.kl",),
    "kl_beta": ("algorithm.kl",),
    "kl_coef": ("algorithm.kl",),
    "kl_loss_coef": ("algorithm.kl",),
    "learning_rate": ("learner.lr",),
    "log_dir": ("run.dir",),
    "loss_agg_mode": ("algorithm.loss",),
    "loss_type": ("algorithm.loss",),
    "max_completion_length": ("rollout.max_response_tokens",),
    "max_grad_norm": ("learner.grad_clip",),
    "max_length": ("rollout.max_model_tokens",),
    "max_model_len": ("rollout.max_model_tokens",),
    "max_new_tokens": ("rollout.max_response_tokens",),
    "max_norm": ("learner.grad_clip",),
    "max_obs_length": ("rollout.max_obs_tokens",),
    "max_prompt_length": ("rollout.max_prompt_tokens",),
    "max_response_length": ("rollout.max_response_tokens",),
    "max_start_length": ("rollout.max_prompt_tokens",),
    "max_steps": ("trainer.steps",),
    "max_token_len_per_gpu": ("learner.tokens_per_microbatch",),
    "max_tokens": ("rollout.max_response_tokens",),
    "micro_batch_size": ("learner.tokens_per_microbatch",),
    "micro_batch_size_per_gpu": ("learner.tokens_per_microbatch",),
    "mini_batch_size": ("learner.minibatches_per_batch",),
    "model": ("model.path",),
    "model_name": ("model.path",),
    "model_name_or_path": ("model.path",),
    "n_agent": ("rollout.group_size",),
    "n_gpus_per_node": ("learner.ranks", "rollout.workers"),
    "n_samples_per_prompt": ("rollout.group_size",),
    "num_epochs": ("trainer.steps",),
    "num_generations": ("rollout.group_size",),
    "num_gpus": ("learner.ranks", "rollout.workers"),
    "num_iterations": ("learner.epochs",),
    "num_steps": ("trainer.steps",),
    "num_train_epochs": ("trainer.steps",),
    "num_workers": ("rollout.workers",),
    "output_dir": ("run.dir",),
    "per_device_train_batch_size": ("learner.tokens_per_microbatch", "rollout.prompts_per_step"),
    "ppo_epochs": ("learner.epochs",),
    "ppo_max_token_len_per_gpu": ("learner.tokens_per_microbatch",),
    "ppo_micro_batch_size": ("learner.tokens_per_microbatch",),
    "ppo_micro_batch_size_per_gpu": ("learner.tokens_per_microbatch",),
    "ppo_mini_batch_size": ("learner.minibatches_per_batch",),
    "pretrain": ("model.path",),
    "project_name": ("run.dir",),
    "retriever_url": ("retriever.url",),
    "reward_function": ("reward.kind",),
    "rollout.n": ("rollout.group_size",),
    "rollout_batch_size": ("rollout.prompts_per_step",),
    "run_name": ("run.name",),
    "save_freq": ("trainer.checkpoint_every",),
    "save_steps": ("trainer.checkpoint_every",),
    "save_total_limit": ("trainer.keep_checkpoints",),
    "search_url": ("retriever.url",),
    "tensor_model_parallel_size": ("rollout.tensor_parallel",),
    "tensor_parallel_size": ("rollout.tensor_parallel",),
    "test_freq": ("trainer.eval_every",),
    "top_n": ("rollout.topk",),
    "total_epochs": ("trainer.steps",),
    "total_training_steps": ("trainer.steps",),
    "train_batch_size": ("rollout.prompts_per_step",),
    "train_data": ("data.train",),
    "train_file": ("data.train",),
    "train_files": ("data.train",),
    "use_dynamic_bsz": ("learner.tokens_per_microbatch",),
    "val_data": ("data.eval",),
    "val_files": ("data.eval",),
}
"""By the last part of a name, or its last two parts."""


def meant_by(key: str, value: Any = None) -> tuple[str, ...]:
    """The keys here that an unknown key may mean; none where no other trainer has it. value: of the key,
    where it is a section: the first name in it then counts."""
    path = ".".join([key, *_first_path(value)]).lower().replace("-", "_")
    parts = path.split(".")
    return ALIASES.get(".".join(parts[-2:])) or ALIASES.get(parts[-1], ())


def keys_with(last: str, keys: Collection[str]) -> list[str]:
    """Those of the dotted keys that end in this name."""
    return [key for key in keys if key.rpartition(".")[2] == last][:MOST]


def keys_like(key: str, keys: Collection[str], value: Any = None) -> list[str]:
    """Those of the dotted keys that an unknown one may mean, in whichever section it was looked for: of the
    same last name, that of another trainer, or with a slip in the last name. value: as `meant_by` has it."""
    last = key.rpartition(".")[2]
    lasts = {known.rpartition(".")[2] for known in keys}
    near = nearest(last, lasts) if len(last) > 2 else None  # of two letters too many are like others
    meant = keys_with(last, keys) or [*meant_by(key, value)][:MOST]
    return meant or (keys_with(near, keys) if near else [])


def _first_path(value: Any) -> Iterator[str]:
    while isinstance(value, Mapping) and value:
        name, value = next(iter(value.items()))
        yield str(name)
