"""The configuration's section `algorithm`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticKnownError

from services.common.loading.user_code import Call, is_import_path, load
from services.settings import Settings
from trainer.algorithm_names import (
    AdvantageKind,
    AnswerSchedule,
    Denominator,
    Form,
    Gate,
    ImportanceMode,
    PolicyLossKind,
    is_known_loss,
)
from trainer.config.presets import promised
from trainer.config.used_with import UsedWith

Band = tuple[float, float]


def _loss_name(name: str) -> str:
    """A loss of ours or an import path; an error of pydantic's own that lists both otherwise."""
    if is_known_loss(name) or is_import_path(name):
        return name
    *first, last = (repr(loss) for loss in get_args(PolicyLossKind))
    expected = f"{', '.join(first)} or {last}, or an import path package.module:function"
    raise PydanticKnownError("literal_error", {"expected": expected})


LossName = Annotated[
    str,
    AfterValidator(_loss_name),
    WithJsonSchema(
        {
            "anyOf": [{"enum": list(get_args(PolicyLossKind))}, {"pattern": "^[\\w.]+:[\\w.]+$"}],
            "type": "string",
        }
    ),
]

USERS_LOSS = Call(3, ("clip_low", "clip_high"))
"""How the learner calls a loss of the user's own."""


def load_users_loss(path: str) -> Callable[..., Any]:
    """The function that `algorithm.loss` names by its import path. Raises UserError."""
    return load("algorithm.loss", path, "a function of log-probs and advantages", USERS_LOSS)


class ImportanceSettings(Settings):
    """Correction for the difference between sampler and learner (truncated importance sampling)."""

    mode: ImportanceMode = "off"
    """`token`: min(exp(logp_old - logp_sampler), cap) on each token; `sequence_mask`: drop sequences whose
    geometric mean leaves [1/cap, cap]."""
    cap: Annotated[float, UsedWith("mode", "off", unlike=True)] = Field(2.0, gt=1)
    """Largest weight."""
    geometric_band: Band | None = None
    """Drop trajectories whose geometric-mean ratio of learner to sampler lies outside [low, high], such as
    [0.99, 1.01]; none is off. Masks stack, with each other and with `mode`."""
    token_band: Band | None = None
    """Drop tokens whose ratio lies outside (IcePop), such as [0.5, 2]; none is off."""
    outlier_band: Band | None = None
    """Drop trajectories with any token whose ratio lies outside, such as [1e-4, 100]; none is off."""

    @property
    def masks(self) -> dict[str, tuple[float, float]]:
        """The bands that are set, by name."""
        names = ("geometric_band", "token_band", "outlier_band")
        return {name: band for name in names if (band := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _around_one(self) -> ImportanceSettings:
        for name, (low, high) in self.masks.items():
            if not 0 < low < 1 < high:
                raise ValueError(f"{name}=[{low:g}, {high:g}]: expected [low, high] with 0 < low < 1 < high")
        return self


class BatchKLSettings(Settings):
    """KL to the policy at the start of the batch, which pulls back in both directions: a control for LLDS."""

    weight: float = Field(0.0, ge=0)
    """Weight; 0 is off."""
    over: Annotated[Literal["all", "preserved"], UsedWith("weight", 0, unlike=True)] = "all"
    """Trajectories whose tokens count: all, or those that LLDS preserves."""


class SupervisedSettings(Settings):
    """Supervised steps between the steps of reinforcement learning (arXiv 2606.26027)."""

    every: int = Field(0, ge=0)
    """Take supervised steps after every n-th batch; 0 is off."""
    data: Annotated[str | None, UsedWith("every", 0, unlike=True)] = None
    """File of demonstrations; docs/data.md has the form."""
    updates: Annotated[int, UsedWith("every", 0, unlike=True)] = Field(1, ge=1)
    """Optimiser steps each time."""
    rows: Annotated[int, UsedWith("every", 0, unlike=True)] = Field(32, ge=1)
    """Demonstrations of a step."""
    lr_scale: Annotated[float, UsedWith("every", 0, unlike=True)] = Field(1.0, gt=0)
    """Factor on the learning rate in these steps."""

    @model_validator(mode="after")
    def _has_data(self) -> SupervisedSettings:
        if self.every and not self.data:
            raise ValueError("every > 0 needs data, a file of demonstrations")
        return self


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
    form: Form = "llds"
    """`llds`; `sapo_search` (arXiv 2603.10069): tokens whose ratio fell below `ratio_below`, without a gate;
    `nll`: every token of the preserved set, whether it fell or not (a control)."""
    ratio_below: Annotated[float, UsedWith("form", "sapo_search")] = Field(0.8, gt=0, le=1)
    """Ratio of the policy to its anchor below which `sapo_search` pulls a token."""
    gate: Annotated[Gate, UsedWith("form", "llds")] = "action"
    """Unit whose summed log-prob must have fallen before its tokens are pulled: LLDS-A, LLDS-R, or no
    gate; `random`: as many tokens as LLDS-A, drawn by lot (a control)."""
    denominator: Annotated[Denominator, UsedWith("form", "sapo_search", unlike=True)] = "preserved"
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

    @property
    def unit(self) -> Gate:
        """The gate that holds: `sapo_search` has none of its own."""
        return "token" if self.form == "sapo_search" else self.gate

    def least_drop(self, min_drop: float) -> float:
        """Drops of at most this many nats count as 0 in the form that is set. min_drop: what the batch took
        for `min_drop`."""
        return max(min_drop, -math.log(self.ratio_below)) if self.form == "sapo_search" else min_drop

    @model_validator(mode="after")
    def _min_drop(self) -> LLDSSettings:
        if self.min_drop != "auto" and self.min_drop < 0:
            raise ValueError("min_drop must be >= 0 or auto")
        return self


class AlgorithmSettings(Settings):
    """Loss and its extras."""

    loss: LossName = "grpo"
    """Policy loss, or an import path `package.module:function` of your own (docs/extend.md);
    docs/algorithms.md has the formulas. `dapo`, `gspo`, `dr_grpo`, `cispo`, `clip_cov` and
    `kl_cov` bring what their papers set for the keys below, where those are not given."""
    advantage: AdvantageKind = "grpo"
    """How rewards of a group become advantages. Not given: `grpo`, with the loss dr_grpo `dr_grpo`."""
    clip_low: float = Field(0.2, gt=0)
    """Lower clip epsilon (not the bound). Not given: 0.2, with gspo 3e-4, with cispo and clip_cov 1."""
    clip_high: float = Field(0.2, gt=0)
    """Upper clip epsilon. Not given: 0.2, with dapo 0.28, with gspo 4e-4, with clip_cov 1."""
    cov_share: Annotated[float, UsedWith("loss", "clip_cov", "kl_cov")] = Field(2e-4, gt=0, le=1)
    """Share of an optimiser step's tokens that clip_cov takes out or kl_cov penalises, at least one token.
    Not given: 2e-4, with kl_cov 2e-3."""
    cov_low: Annotated[float, UsedWith("loss", "clip_cov")] = 1.0
    """Covariance of log-prob and advantage above which clip_cov may draw a token."""
    cov_high: Annotated[float, UsedWith("loss", "clip_cov")] = 5.0
    """Covariance below which clip_cov may draw a token."""
    cov_kl: Annotated[float, UsedWith("loss", "kl_cov")] = Field(1.0, ge=0)
    """Weight of kl_cov's penalty."""
    negatives: float = Field(1.0, ge=0)
    """Factor on negative advantages in the policy loss; 1 is off."""
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
    batch_kl: BatchKLSettings = BatchKLSettings()
    supervised: SupervisedSettings = SupervisedSettings()

    @model_validator(mode="after")
    def _fits(self) -> AlgorithmSettings:
        # Not by assignment, which would count these keys among those that the user has set.
        self.__dict__.update(promised(self.loss, self))
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low={self.cov_low:g} must be below cov_high={self.cov_high:g}")
        if self.llds.answer_weight == "code" and self.llds.answer_lambda == 0:
            raise ValueError(
                "algorithm.llds.answer_lambda=0 with answer_weight=code keeps the answer span's weight at 0 "
                "for ever; set it above 0"
            )
        return self
