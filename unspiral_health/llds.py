"""LLDS for the loss of another trainer, with a check that says whether it acts. Needs torch."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from unspiral_health import needs_torch  # noqa: F401

# isort: split
import torch
from torch import Tensor

from services.common.errors import UserError
from trainer.algorithm_names import Denominator, Gate
from trainer.algorithms.losses.llds import llds_loss

__all__ = ["LLDS", "action_ids", "llds_loss"]
log = logging.getLogger("unspiral.health")
LAMBDA = 0.2
"""The paper's weight (arXiv 2512.04220)."""
FIRST_REPORT = 16
"""Calls without an active token after which a warning says why; again after four times as many."""


def action_ids(mask: Tensor) -> Tensor:
    """int64 [B, T] of a mask [B, T], true on tokens that the model wrote: each unbroken run of them is one
    action, 0, 1, .. in its row; -1 outside."""
    inside = mask > 0.5
    before = torch.nn.functional.pad(inside[:, :-1], (1, 0))
    return torch.where(inside, (inside & ~before).long().cumsum(1) - 1, -1)


@dataclass
class Seen:
    """What LLDS met so far, over all calls with gradients."""

    calls: int = 0
    moved: int = 0
    """Calls in which some log-prob differed from its old one."""
    active_tokens: float = 0.0
    preserved_tokens: float = 0.0
    actions: int = 0
    rows: int = 0


class LLDS:
    """`lam * llds_loss`, divided by its count: the term to add to a trainer's loss.

    lam: the paper's lambda. gate, denominator, min_drop: as in `llds_loss`. The term of a micro-batch is its
    own mean; adapters weigh it by the micro-batch's share of the optimiser step.

    The check: `acts` and `report` say whether tokens are held, by which gate, and whether the old log-probs
    are from before the update. The first active token is logged, and so is its absence, with the reason. The
    metrics `llds/active_tokens` and `llds/lambda` let the monitor raise `silent_llds`.
    """

    def __init__(
        self,
        lam: float = LAMBDA,
        *,
        gate: Gate = "action",
        denominator: Denominator = "preserved",
        min_drop: float = 0.0,
    ):
        if isinstance(lam, bool) or not isinstance(lam, int | float) or not lam >= 0:
            raise UserError(f"LLDS: lam: expected a number of at least 0, got {lam!r}")
        self.lam = lam
        self.gate = gate
        self.denominator = denominator
        self.min_drop = min_drop
        self.seen = Seen()
        self.metrics: dict[str, float] = {}
        """Of the last call: `llds/loss`, `llds/lambda`, `llds/active_tokens`, `llds/active_actions`,
        `llds/preserved_tokens`, `llds/min_drop`."""
        self._next_report = FIRST_REPORT
        self._told_odd = False

    @classmethod
    def from_environment(cls) -> LLDS:
        """With the variable UNSPIRAL_LLDS_LAMBDA as lambda, where it is set: for trainers whose workers are
        other processes."""
        text = os.environ.get("UNSPIRAL_LLDS_LAMBDA", str(LAMBDA))
        try:
            return cls(float(text))
        except ValueError:
            raise UserError(f"UNSPIRAL_LLDS_LAMBDA: expected a number, got {text!r}") from None

    def __call__(self, logp: Tensor, logp_old: Tensor | None, advantages: Tensor, mask: Tensor) -> Tensor:
        """0-dim tensor.

        logp [B, T]: log-probs with gradient. logp_old [B, T]: the learner's own, from before the update of
        this batch. advantages: [B], or [B, T] with one value per row. mask [B, T]: true on tokens that the
        model wrote. Raises UserError where logp_old is missing or has a gradient, logp has none in training,
        or shapes do not fit each other. Log-probs that are no numbers are left out, and told once.
        """
        if logp_old is None:
            raise UserError(
                "LLDS: no log-probs from before the update are kept, as in training with one optimiser step "
                "per batch, where LLDS could never act; take several steps per batch"
            )
        if logp_old.requires_grad:
            raise UserError("LLDS: logp_old has a gradient; expected log-probs from before the update")
        if torch.is_grad_enabled() and not logp.requires_grad:
            raise UserError(
                "LLDS: logp has no gradient, so nothing would be trained; expected the log-probs that the "
                "loss is made of (in an evaluation: under torch.no_grad())"
            )
        for name, given in (("logp_old", logp_old), ("mask", mask)):
            if given.shape != logp.shape:
                has = f"expected {list(logp.shape)} as logp has, got {list(given.shape)}"
                raise UserError(f"LLDS: {name}: {has}")
        ids = action_ids(mask)
        inside = ids >= 0
        if not self._told_odd and (odd := int((~(logp.detach() + logp_old).isfinite() & inside).sum())):
            self._told_odd = True
            log.warning("LLDS: %d log-probs are not finite, and are left out: does the model diverge?", odd)
        if advantages.ndim == 2:
            rows = torch.where(inside, advantages.detach(), 0).sum(1) / inside.sum(1).clamp(min=1)
        else:
            rows = advantages.detach()
        term = llds_loss(
            logp, logp_old, rows, ids,
            gate=self.gate, denominator=self.denominator, min_drop=self.min_drop,
        )  # fmt: skip
        loss = self.lam * term.loss_sum / max(term.count, 1.0)
        if torch.is_grad_enabled():  # not in an evaluation
            self._remember(term.stats, loss, ids, bool((logp.detach() != logp_old)[inside].any()))
        return loss

    @property
    def acts(self) -> bool:
        """Whether a token was held so far."""
        return self.lam > 0 and self.seen.active_tokens > 0

    def report(self) -> str:
        """One line: that LLDS acts, by which gate and against which log-probs, or why it does not."""
        s = self.seen
        if not self.acts:
            return f"LLDS does nothing (after {s.calls} calls): {self._reason()}"
        share = s.active_tokens / s.preserved_tokens
        each = s.actions / max(s.rows, 1)
        text = (
            f"LLDS acts: {s.active_tokens:.0f} active tokens, {share:.1%} of the preserved; gate by "
            f"{self.gate}, {each:.1f} actions per response; old log-probs from before the update in "
            f"{s.moved} of {s.calls} calls"
        )
        alone = self.gate == "action" and s.actions == s.rows
        return text + ("; where tools answer, their tokens must be 0 in the mask" if alone else "")

    def _reason(self) -> str:
        s = self.seen
        if self.lam == 0:
            return "lambda is 0"
        if not s.calls:
            return "the trainer's loss never called it"
        if not s.preserved_tokens:
            return "no response has an advantage of at least 0"
        if not s.moved:
            return (
                "the log-probs equal the old ones in every call: there is one optimiser step per batch, or "
                "the old ones are computed with the weights of now"
            )
        return f"no preserved {self.gate} lost likelihood by more than min_drop, {self.min_drop:g} nats"

    def _remember(self, stats: dict[str, float], loss: Tensor, ids: Tensor, moved: bool) -> None:
        s = self.seen
        acted = self.acts
        s.calls += 1
        s.moved += moved
        s.active_tokens += stats["active_tokens"]
        s.preserved_tokens += stats["preserved_tokens"]
        per_row = ids.max(1).values + 1
        s.actions += int(per_row.sum())
        s.rows += int((per_row > 0).sum())
        self.metrics = {
            "llds/loss": float(loss.detach()),
            "llds/lambda": self.lam,
            "llds/min_drop": self.min_drop,
            **{f"llds/{k}": stats[k] for k in ("active_tokens", "active_actions", "preserved_tokens")},
        }
        if self.acts and not acted:
            log.info("%s", self.report())
        elif not self.acts and s.calls >= self._next_report:
            self._next_report *= 4
            log.warning("%s", self.report())

    def __repr__(self) -> str:
        return f"LLDS(lam={self.lam:g}, gate={self.gate!r})"
