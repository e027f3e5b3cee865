"""Metrics by the names of other trainers: which of theirs is which of ours, and a guess at whose a file is.

The names are those that the trainers' own sources and logs use; a file of one's own (`--map FILE`) says
others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.common.names import accepted
from services.likelihood.exports.run_files import read_mapping
from services.likelihood.monitor.detectors.table import READS
from services.likelihood.monitor.watch import number

KNOWN = {name for names in READS.values() for name in names}
"""Metrics that some rule reads."""
COMPLEMENT = "1 - "
"""Before a name: the metric is a share, and ours is the other part."""


@dataclass(frozen=True)
class NameMap:
    """The names of one trainer. names: ours -> theirs, the first of which that a step has counts."""

    trainer: str
    names: Mapping[str, tuple[str, ...]]

    def translated(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The step's metrics with ours added. A metric that is there by our name stays."""
        out = dict(metrics)
        for ours, theirs in self.names.items():
            if ours in out:
                continue
            found = next((t for t in theirs if t.removeprefix(COMPLEMENT) in metrics), None)
            if found is None:
                continue
            value = metrics[found.removeprefix(COMPLEMENT)]
            known = number(value)
            complement = found.startswith(COMPLEMENT) and known is not None
            out[ours] = 1.0 - known if complement and known is not None else value
        return out

    @property
    def theirs(self) -> set[str]:
        """All names of theirs."""
        return {name.removeprefix(COMPLEMENT) for names in self.names.values() for name in names}

    def hits(self, seen: set[str]) -> int:
        """How many of our metrics a file of these names gives."""
        return sum(any(t.removeprefix(COMPLEMENT) in seen for t in theirs) for theirs in self.names.values())


TRAINERS: dict[str, dict[str, tuple[str, ...]]] = {
    "verl": {
        "reward/mean": ("critic/score/mean", "critic/rewards/mean"),
        "entropy": ("actor/entropy", "actor/entropy_loss"),
        "grad_norm": ("actor/grad_norm",),
        "policy/clip_fraction": ("actor/pg_clipfrac",),
        "kl/ref": ("actor/kl_loss",),
        "kl/sampler": ("rollout_corr/k3_kl", "rollout_corr/kl"),
        "rollout/length": ("response_length/mean",),
        "rollout/truncated": ("response_length/clip_ratio",),
        "rollout/searches": ("tool_call_counts/mean",),
    },
    "trl": {
        "reward/mean": ("reward",),
        "entropy": ("entropy",),
        "grad_norm": ("grad_norm",),
        "policy/clip_fraction": ("clip_ratio/region_mean", "clip_ratio"),
        "kl/ref": ("kl",),
        "mismatch/abs_logp": ("sampling/sampling_logp_difference/mean",),
        "groups/zero_variance": ("frac_reward_zero_std",),
        "rollout/length": ("completions/mean_length",),
        "rollout/truncated": ("completions/clipped_ratio",),
        "rollout/searches": ("tools/call_frequency",),
        "retrieval/errors": ("tools/failure_frequency",),
    },
    "openrlhf": {
        "reward/mean": ("train/reward", "reward"),
        "entropy": ("train/entropy_loss", "entropy_loss"),
        "grad_norm": ("train/actor_grad_norm", "actor_grad_norm"),
        "policy/clip_fraction": ("train/ppo_clip_ratio", "ppo_clip_ratio"),
        "kl/ref": ("train/kl", "kl"),
        "kl/sampler": ("train/vllm_kl", "vllm_kl"),
        "rollout/length": ("train/response_length", "response_length"),
        "rollout/truncated": ("train/truncated", "truncated"),
    },
    "skyrl": {
        "reward/mean": ("reward/avg_raw_reward", "loss/avg_final_rewards", "loss/avg_raw_rewards"),
        "entropy": ("policy/policy_entropy",),
        "grad_norm": ("policy/grad_norm", "policy/raw_grad_norm"),
        "policy/clip_fraction": ("policy/ppo_clip_ratio",),
        "kl/ref": ("policy/policy_kl",),
        "mismatch/abs_logp": ("policy/rollout_train_logprobs_abs_diff_mean",),
        "rollout/length": ("generate/avg_num_tokens",),
        "eval/em_greedy": ("eval/all/avg_score",),
    },
    "slime": {
        "reward/mean": ("rollout/raw_reward", "rollout/rewards"),
        "entropy": ("train/entropy_loss",),
        "grad_norm": ("train/grad_norm",),
        "policy/clip_fraction": ("train/pg_clipfrac",),
        "kl/ref": ("train/kl_loss",),
        "mismatch/abs_logp": ("train/train_rollout_logprob_abs_diff",),
        "rollout/length": ("rollout/response_len/mean",),
        "rollout/truncated": ("rollout/truncated_ratio",),
        "text/repetition": ("rollout/repetition_frac",),
    },
}
MAPS = {trainer: NameMap(trainer, names) for trainer, names in TRAINERS.items()}


def chosen_map(given: str | None, rows: Iterable[Mapping[str, Any]]) -> NameMap | None:
    """The map that `--map` names, a trainer or a YAML file; without it a guess by the names in the rows. None
    where the names are our own. Raises UserError."""
    if given is None:
        return guessed({name for row in rows for name in row})
    if given in MAPS:
        return MAPS[given]
    path = Path(given)
    if not path.is_file():
        raise UserError(f"--map {given}: no such file, and no trainer; {accepted(given, list(MAPS))}")
    return map_of(path)


def guessed(seen: set[str]) -> NameMap | None:
    """The trainer whose names give the most of our metrics, where that is more than the file has already."""
    best = max(MAPS.values(), key=lambda m: m.hits(seen))
    return best if best.hits(seen) > len(KNOWN & seen) else None


def map_of(path: Path) -> NameMap:
    """A map from YAML: `our name: their name`, a list of names, or `1 - NAME`. Raises UserError naming the
    key."""
    names: dict[str, tuple[str, ...]] = {}
    for ours, theirs in read_mapping(path).items():
        listed = theirs if isinstance(theirs, list) else [theirs]
        if not listed or not all(isinstance(one, str) for one in listed):
            raise UserError(f"{path}: {ours}: expected the name of a metric, or a list of names")
        if ours not in KNOWN:
            raise UserError(f"{path}: {ours}: no rule reads it; {accepted(str(ours), sorted(KNOWN))}")
        names[str(ours)] = tuple(listed)
    return NameMap(path.stem, names)
