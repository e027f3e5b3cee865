"""Thresholds of the phase monitor, each with what it is for."""

from __future__ import annotations

from pydantic import Field

from services.settings import Settings


class MonitorRules(Settings):
    """Nats are a token; windows and patiences are counted in steps that have the metric."""

    lag_nats: float = Field(-0.08, lt=0)
    """Alarm when the mean of `probe/lag` is below this."""
    lag_sigmas: float = Field(3.0, ge=0)
    """Where the probe is noisier than usual (few trajectories), the mean must also lie so many of its standard errors below 0."""
    lag_clear_nats: float = Field(-0.03, le=0)
    """The alarm ends when the mean is above this again."""
    lag_window: int = Field(5, ge=1)
    """Values of `probe/lag` (and of `probe/fixed`, `entropy`, `leak/logp_entropy`) in the mean."""
    fixed_drop_nats: float = Field(0.15, gt=0)
    """Sign: `probe/fixed` this far below its best of the last `memory_steps` (both are means of `lag_window` values)."""
    memory_steps: int = Field(60, ge=5)
    """Steps over which the fixed probe's best and the entropy's lowest value are remembered."""
    share_negative: float = Field(0.5, gt=0, lt=1)
    """Sign: share of preserved responses that the update made less likely (mean of `share_window`). Read with LLDS off only: LLDS lowers it."""
    share_window: int = Field(10, ge=1)
    """Values of `displacement/share_negative` in the mean."""
    leak_nats: float = Field(0.1, gt=0)
    """Alarm when sampled tokens' surprise and entropy differ by more: sampler and learner have different supports."""
    patience: int = Field(3, ge=1)
    """Steps running that a threshold must be passed."""
    clear_patience: int = Field(8, ge=1)
    """Steps running before an alarm ends."""
    acceleration_nats: float = Field(-0.25, lt=0)
    """Acceleration when the lag probe's mean is below this, or below `lag_nats` together with one of the three signs that follow
    (`grad_norm_mads`, `entropy_rise_nats`, `share_negative`)."""
    grad_norm_mads: float = Field(5.0, gt=0)
    """Sign: gradient norm (mean of 3) above the baseline's median by so many median absolute deviations."""
    entropy_rise_nats: float = Field(0.3, gt=0)
    """Sign: entropy this far above its lowest mean of the last `memory_steps`."""
    baseline_steps: int = Field(20, ge=5)
    """Steps without trouble that make the baseline of gradient norm."""
    collapse_share: float = Field(0.5, gt=0, lt=1)
    """Collapsed when the mean reward is under this share of its running maximum."""
    reward_window: int = Field(8, ge=1)
    """Steps in the mean reward, and steps running that it must stay low."""
    reward_floor: float = Field(0.05, ge=0)
    """A running maximum below this is no reward to lose: the collapse rule waits."""
    nonfinite_steps: int = Field(2, ge=1)
    """Collapsed when the gradient norm was not finite (null) for so many steps running."""
    dead_clip_fraction: float = Field(0.99, gt=0, le=1)
    """Alarm when no group has two different rewards and at least this share of ratios is clipped."""
    flat_nats: float = Field(-0.015, lt=0)
    """Slow slip: the lag probe's mean over `share_window` values is below this (until above a third of it). With reward that holds or
    rises it is stagnation; with `probe/fixed` down by `fixed_drop_nats` it is decay."""
    hold_share: float = Field(0.95, gt=0, le=1)
    """Reward holds while its mean is at least this share of its running maximum."""
    recover_steps: int = Field(15, ge=1)
    """Steps without trouble until `recovering` becomes `healthy`."""
