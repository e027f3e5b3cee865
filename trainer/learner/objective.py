"""The loss of one micro-batch. Pure torch: no Ray, no DeepSpeed, no I/O.

Each term is a sum and a count. Its share of the loss is `coefficient * sum / count of the whole optimiser
step` (all micro-batches of all ranks), so the gradient does not depend on how the step was divided.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from torch import Tensor

from services.common.errors import UserError
from services.common.loading.user_code import calling
from services.contracts import TrainBatch
from trainer.algorithm_names import is_known_loss
from trainer.algorithms import (
    LossTerm,
    TokenLoss,
    entropy_bonus,
    importance_weights,
    kl_batch_start,
    kl_k3,
    llds_loss,
    mismatch_masks,
    nll_loss,
    policy_loss,
    token_lottery,
    users_policy_loss,
)
from trainer.algorithms.terms import NOT_SUMMED
from trainer.config.algorithm import AlgorithmSettings, load_users_loss
from trainer.learner.batches.micro_batches import MicroBatch, scored

TERMS = ("policy", "llds", "kl", "entropy", "batch_kl")


@cache
def token_loss(path: str) -> TokenLoss:
    """The user's own loss of `algorithm.loss`. Raises UserError."""
    return load_users_loss(path)


def can_act(algorithm: AlgorithmSettings, batch: TrainBatch, *, llds_lambda: float, anchored: bool) -> bool:
    """Whether any term of the loss can have a gradient in a batch, of whatever optimiser step.

    The policy term has one where an advantage is not 0, KL and entropy bonus wherever they are on. LLDS alone
    has one where it compares with other weights than those of the batch's start (anchored), where it needs
    no drop (`nll`), or once another term has moved the weights, as the KL to the batch's start does.
    """
    valid = batch.valid
    if (algorithm.kl or algorithm.entropy) and valid.any():
        return True
    pushes = batch.advantages[valid]
    if algorithm.negatives == 0:
        # Not `pushes >= 0`, which NaN is not: it must stay, for the next line.
        pushes = pushes[~(pushes < 0)]
    if np.any(pushes != 0):  # NaN is not 0 either: such a step is skipped and counted
        return True
    anchored = anchored or algorithm.llds.form == "nll"
    return bool(llds_lambda and anchored and batch.preserved[valid].any())


@dataclass(frozen=True)
class Objective:
    """`L = policy + llds_lambda * LLDS + kl * k3 + entropy * (minus entropy) + batch_kl.weight * KL to the
    batch's start` of one optimiser step."""

    algorithm: AlgorithmSettings
    llds_lambda: float
    answer_beta: float = 1.0
    """Weight of LLDS on answer-span tokens (LLDS-MA)."""
    min_drop: float = 0.0
    """Drops of at most this many nats count as 0 in LLDS."""
    seed: int = 0
    """Of the lots that LLDS's gate `random` draws."""

    @property
    def coefficients(self) -> dict[str, float]:
        a = self.algorithm
        return {
            "policy": 1.0,
            "llds": self.llds_lambda,
            "kl": a.kl,
            "entropy": a.entropy,
            "batch_kl": a.batch_kl.weight,
        }

    def terms(self, logp: Tensor, entropy: Tensor, m: MicroBatch) -> dict[str, LossTerm]:
        """The terms of a micro-batch, from log-probs and entropies [B, T] (anything outside the action mask).

        LLDS is also computed with lambda 0, without gradient, so that an unregularised run shows what it
        would have acted on.
        """
        a = self.algorithm
        logp_old = scored(m.logp_old)
        advantages = m.advantages
        if a.negatives != 1:
            advantages = torch.where(advantages < 0, advantages * a.negatives, advantages)
        terms = {
            "policy": self._policy(logp, logp_old, advantages, m),
            "llds": self._preserving(logp if self.llds_lambda else logp.detach(), m),
        }
        if a.kl:
            terms["kl"] = kl_k3(logp, scored(m.logp_ref), m.action_ids)
        if a.entropy:
            terms["entropy"] = entropy_bonus(entropy, m.action_ids)
        if a.batch_kl.weight:
            preserved = m.preserved if a.batch_kl.over == "preserved" else None
            terms["batch_kl"] = kl_batch_start(logp, logp_old, m.action_ids, preserved=preserved)
        return terms

    def _policy(self, logp: Tensor, logp_old: Tensor, advantages: Tensor, m: MicroBatch) -> LossTerm:
        """The policy term: of a loss that is known by name, or of the user's own."""
        a = self.algorithm
        if not is_known_loss(a.loss):
            with calling(f"algorithm.loss={a.loss}", passes=(UserError,)):
                return users_policy_loss(
                    token_loss(a.loss),
                    logp,
                    logp_old,
                    advantages,
                    m.action_ids,
                    clip_low=a.clip_low,
                    clip_high=a.clip_high,
                    importance_weights=self._weights(m),
                )
        return policy_loss(
            a.loss,
            logp,
            logp_old,
            advantages,
            m.action_ids,
            clip_low=a.clip_low,
            clip_high=a.clip_high,
            max_response_tokens=a.dr_grpo_tokens,
            importance_weights=self._weights(m),
            chosen=m.chosen,
            cov_kl=a.cov_kl,
        )

    def _weights(self, m: MicroBatch) -> Tensor | None:
        """Weight of each token in the policy term, for the difference of sampler and learner; None: 1."""
        settings = self.algorithm.importance
        if m.logp_sampler is None:
            return None
        logp_old = scored(m.logp_old)
        weights = None
        if settings.mode != "off":
            weights = importance_weights(
                logp_old, m.logp_sampler, m.action_ids, mode=settings.mode, cap=settings.cap
            )
        if masks := settings.masks:
            kept = mismatch_masks(logp_old, m.logp_sampler, m.action_ids, **masks)
            # `where` and no product: a ratio that is NaN lies outside every band, and 0 times NaN is NaN.
            weights = kept if weights is None else torch.where(kept == 0, 0.0, weights)
        return weights

    def _preserving(self, logp: Tensor, m: MicroBatch) -> LossTerm:
        """The term on the preserved set, in the form that is set."""
        llds = self.algorithm.llds
        answer_weight = self.answer_beta if m.answer_mask is not None else 1.0
        if llds.form == "nll":
            return nll_loss(
                logp,
                m.action_ids,
                preserved=m.preserved,
                denominator=llds.denominator,
                answer_mask=m.answer_mask,
                answer_weight=answer_weight,
            )
        lottery = None
        if llds.unit == "random":
            # By the rows' places in the batch: a token draws the same lot however the step is divided.
            rows = torch.tensor(m.rows or [0], dtype=torch.int64, device=logp.device)
            lottery = token_lottery(rows, m.action_ids.shape[1], self.seed)
        return llds_loss(
            logp,
            scored(m.logp_old) if m.logp_anchor is None else m.logp_anchor,
            m.advantages,
            m.action_ids,
            gate=llds.unit,
            denominator="preserved" if llds.form == "sapo_search" else llds.denominator,
            answer_mask=m.answer_mask,
            answer_weight=answer_weight,
            min_drop=llds.least_drop(self.min_drop),
            preserved=m.preserved,
            lottery=lottery,
        )

    def counts(self, m: MicroBatch) -> list[float]:
        """Count of each of TERMS, known before any forward pass: it depends on masks and advantages alone. 0
        where a term is off."""
        nothing = torch.zeros(m.action_ids.shape, device=m.action_ids.device)
        blank = MicroBatch(
            m.rows, m.lengths, m.input_ids, m.action_ids, m.at, m.advantages, m.preserved, m.answer_mask
        )
        blank.logp_old = blank.logp_ref = nothing
        terms = self.terms(nothing, nothing, blank)
        return [terms[name].count if name in terms else 0.0 for name in TERMS]

    def loss(self, terms: dict[str, LossTerm], counts: dict[str, float]) -> Tensor:
        """This micro-batch's share of the step's loss. counts: of the whole optimiser step; a term whose
        count is 0 is 0.

        A loss that is not finite becomes NaN as a whole, so that each gradient is NaN too and the step is
        skipped on every rank.
        """
        total = terms["policy"].loss_sum / max(counts["policy"], 1.0)
        for name, coefficient in self.coefficients.items():
            if name != "policy" and name in terms and coefficient and counts[name]:
                total = total + coefficient / counts[name] * terms[name].loss_sum
        return total * torch.where(total.detach().isfinite(), 1.0, torch.nan)


@dataclass
class StepStats:
    """What one optimiser step did on one rank; `merged` joins ranks."""

    sums: dict[str, float] = field(default_factory=dict)
    ratio_max: float = 0.0
    tokens: int = 0
    """Tokens of the rows that were trained on, prompts and observations included, padding not."""
    grad_norm: float = float("nan")
    skipped: bool = False

    def add(self, terms: dict[str, LossTerm], m: MicroBatch) -> None:
        """Counts of one micro-batch. The loss terms bring their numbers from the device here: call it after
        the backward pass."""
        for name, term in terms.items():
            values = {f"{name}/loss": float(term.loss_sum.detach()), f"{name}/count": term.count}
            for key, value in term.stats.items():
                if key not in NOT_SUMMED:
                    values[f"{name}/{key}"] = value
            for key, value in values.items():
                self.sums[key] = self.sums.get(key, 0.0) + value
        self.ratio_max = max(self.ratio_max, terms["policy"].stats["ratio_max"])
        self.tokens += sum(m.lengths)

    @staticmethod
    def merged(ranks: list[StepStats]) -> StepStats:
        """One step over all ranks."""
        # Norm and decision are those of the gradient that the ranks have added up, and the same on each.
        first = ranks[0]
        keys = sorted({k for r in ranks for k in r.sums})
        return StepStats(
            {k: sum(r.sums.get(k, 0.0) for r in ranks) for k in keys},
            max(r.ratio_max for r in ranks),
            sum(r.tokens for r in ranks),
            first.grad_norm,
            first.skipped,
        )


def update_metrics(steps: list[StepStats], *, kl: bool) -> dict[str, float]:
    """The metrics of a batch's optimiser steps. Gradient norms: before clipping, of the steps that were
    taken; NaN where none of those that were due could be. Where no step was due there is nothing to measure,
    and only the counts of steps are given."""
    if not steps:
        return {"learner/optimiser_steps": 0.0, "learner/skipped": 0.0}
    metrics: dict[str, float] = {}
    taken = [s.grad_norm for s in steps if not s.skipped]
    metrics["grad_norm"] = sum(taken) / len(taken) if taken else float("nan")
    metrics["grad_norm/max"] = max(taken, default=float("nan"))
    metrics["ratio/max"] = max(s.ratio_max for s in steps)

    def total(key: str) -> float:
        return sum(s.sums.get(key, 0.0) for s in steps)

    def share(name: str, key: str, of: str) -> None:
        if count := total(of):
            metrics[name] = total(key) / count

    # A loss is a mean over steps, each of which was one gradient. Shares are of all their tokens together.
    metrics["policy/loss"] = sum(
        s.sums["policy/loss"] / max(s.sums["policy/count"], 1.0) for s in steps
    ) / len(steps)
    share("policy/clip_fraction", "policy/clipped_tokens", "policy/action_tokens")
    if any("policy/zero_weight_tokens" in s.sums for s in steps):
        share("importance/zero_weight", "policy/zero_weight_tokens", "policy/action_tokens")
    share("kl/batch_start", "batch_kl/loss", "batch_kl/count")
    if kl:
        share("kl/ref", "kl/loss", "kl/count")
    metrics["llds/loss"] = sum(s.sums["llds/loss"] / max(s.sums["llds/count"], 1.0) for s in steps) / len(
        steps
    )
    metrics["llds/active_tokens"] = total("llds/active_tokens")
    metrics["llds/active_actions"] = total("llds/active_actions")
    share("llds/active_share", "llds/active_tokens", "llds/preserved_tokens")
    share("llds/active_action_share", "llds/active_actions", "llds/preserved_actions")
    for i, s in enumerate(steps):
        metrics[f"llds/active_tokens_step_{i}"] = s.sums["llds/active_tokens"]
    metrics["learner/optimiser_steps"] = float(len(taken))
    metrics["learner/skipped"] = float(len(steps) - len(taken))
    metrics["learner/tokens"] = float(sum(s.tokens for s in steps))
    metrics["learner/action_tokens"] = total("policy/action_tokens")
    return metrics
