"""The configuration's section `algorithm`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from services.settings import Settings
from trainer.algorithm_names import (
    AdvantageKind,
    AnswerSchedule,
    Denominator,
    Gate,
    ImportanceMode,
    PolicyLossKind,
)
from trainer.config.presets import promised
from trainer.config.used_with import UsedWith


class ImportanceSettings(Settings):
    """Correction for the difference between sampler and learner (truncated importance sampling)."""

    mode: ImportanceMode = "off"
    """`token`: min(exp(logp_old - logp_sampler), cap) on each token; `sequence_mask`: drop sequences whose
    geometric mean leaves [1/cap, cap]."""
    cap: Annotated[float, UsedWith("mode", "off", unlike=True)] = Field(2.0, gt=1)
    """Largest weight."""


class OverlongSettings(Settings):
    """DAPO's soft penalty for answers that come near the length limit (arXiv 2503.14476, eq. 13)."""

    tokens: int = Field(0, ge=0)
    """Width of the soft zone below the limit, in model tokens; 0 is off."""
    penalty: Annotated[float, UsedWith("tokens", 0, unlike=True)] = Field(1.0, ge=0)
    """Reward taken off at the limit."""


class LLDSSettings(Settings):
    """Lazy likelihood displacement regularisation (arXiv 2512.04220): a one-sided pull on tokens of right or
    untrained answers that lost likelihood."""

    lambda_: float = Field(0.2, ge=0, alias="lambda")
    """Weight; 0 is off. The paper takes 0.2, and 0.3 for a 7B instruct model."""
    gate: Gate = "action"
    """Unit whose summed log-prob must have fallen before its tokens are pulled: LLDS-A, LLDS-R, or no
    gate."""
    denominator: Denominator = "preserved"
    """Token count that divides the sum: of the preserved set (paper) or of all action tokens (released
    code)."""
    preserve: Literal["nonnegative", "right"] = "nonnegative"
    """Preserved set: advantage >= 0 (paper), or those of them alone that are right (`reward.right_at`)."""
    anchor: Literal["batch_start", "snapshot"] = "batch_start"
    """Where likelihood is compared with: the weights at the start of the batch, or a kept copy of the
    weights."""
    snapshot_every: Annotated[int, UsedWith("anchor", "snapshot")] = Field(10, ge=1)
    """Steps between refreshes of the kept copy (anchor `snapshot`)."""
    answer_weight: AnswerSchedule = "off"
    """Weight beta on the answer span (LLDS-MA): the paper's schedule or the released code's."""
    answer_lambda: Annotated[float, UsedWith("answer_weight", "code")] = Field(0.1, ge=0)
    """Slope of the released code's schedule."""
    min_drop: float | Literal["auto"] = "auto"
    """Drops of at most this many nats count as 0; `auto` measures the noise of re-scoring."""

    @model_validator(mode="after")
    def _min_drop(self) -> LLDSSettings:
        if self.min_drop != "auto" and self.min_drop < 0:
            raise ValueError("min_drop must be >= 0 or auto")
        return self


class AlgorithmSettings(Settings):
    """Loss and its extras."""

    loss: PolicyLossKind = "grpo"
    """Policy loss; docs/algorithms.md has the formulas. `dapo`, `gspo`, `dr_grpo` and `cispo` bring what
    their papers set for the keys below, where those are not given."""
    advantage: AdvantageKind = "grpo"
    """How rewards of a group become advantages. Not given: `grpo`, with the loss dr_grpo `dr_grpo`."""
    clip_low: float = Field(0.2, gt=0)
    """Lower clip epsilon (not the bound). Not given: 0.2, with gspo 3e-4, with cispo 1 (no lower bound)."""
    clip_high: float = Field(0.2, gt=0)
    """Upper clip epsilon. Not given: 0.2, with dapo 0.28, with gspo 4e-4."""
    kl: float = Field(0.0, ge=0)
    """Weight of the KL to the reference model (k3); paper: 0.001."""
    entropy: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    dr_grpo_tokens: Annotated[int | None, UsedWith("loss", "dr_grpo")] = Field(None, ge=1)
    """Fixed length, in tokens, that divides dr_grpo's sum. Not given, with that loss: the most that a model
    may write in a trajectory, rollout.max_response_tokens x (rollout.max_turns + 1)."""
    dynamic_sampling: int = Field(0, ge=0)
    """DAPO: most extra rounds of prompts sampled to replace groups in which every reward is the same; 0 is
    off. Not given: 0, with dapo 10 (with rollout.max_staleness, which excludes it, 0)."""
    importance: ImportanceSettings = ImportanceSettings()
    overlong: OverlongSettings = OverlongSettings()
    llds: LLDSSettings = LLDSSettings()

    @model_validator(mode="after")
    def _fits(self) -> AlgorithmSettings:
        # Not by assignment, which would count these keys among those that the user has set.
        self.__dict__.update(promised(self.loss, self))
        if self.llds.answer_weight == "code" and self.llds.answer_lambda == 0:
            raise ValueError(
                "algorithm.llds.answer_lambda=0 with answer_weight=code keeps the answer span's weight at 0 "
                "for ever; set it above 0"
            )
        return self
