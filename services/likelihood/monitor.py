"""The phase monitor: names the phase that a run is in and raises alarms, from likelihood before reward.

A pure state machine over the metrics of each step: no clock, no I/O, so that it replays over any recorded run. The order of phases
is that of arXiv 2512.04220 (I stagnation, II decay, III acceleration, collapse); the paper gives no numeric rule, so the rules are ours.
They feed on the *lag probe*: right trajectories of some steps ago, scored again under the weights of now. The batch's own right
samples are survivors: their log-prob stays high while that of earlier right answers decays. Reward decides over `collapsed` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import Field

from services.likelihood.watch import Watch, Window
from services.settings import Settings

Phase = Literal["healthy", "stagnation", "decay", "acceleration", "collapsed", "recovering"]
PHASES: tuple[Phase, ...] = ("healthy", "stagnation", "decay", "acceleration", "collapsed", "recovering")
TROUBLE = ("decay", "acceleration", "collapsed")


class MonitorRules(Settings):
    """Thresholds of the phase monitor. Nats are a token; windows and patiences are counted in steps that have the metric."""

    lag_nats: float = Field(-0.08, lt=0)
    """Alarm when the mean of `probe/lag` is below this."""
    lag_clear_nats: float = Field(-0.03, le=0)
    """The alarm ends when the mean is above this again."""
    lag_window: int = Field(5, ge=1)
    """Values of `probe/lag` in the mean."""
    fixed_drop_nats: float = Field(0.15, gt=0)
    """Confirmation: `probe/fixed` this far below its best (both means of `lag_window` values)."""
    fixed_alarm_nats: float = Field(0.4, gt=0)
    """Alarm on the fixed probe alone: a fall this deep is an alarm even where the lag probe never moved fast enough."""
    share_negative: float = Field(0.5, gt=0, lt=1)
    """Share of preserved responses that an update made less likely (mean of `share_window`). Read with LLDS off only: LLDS lowers it."""
    share_window: int = Field(10, ge=1)
    """Values of `displacement/share_negative` in the mean."""
    leak_nats: float = Field(0.1, gt=0)
    """Alarm when sampled tokens' surprise and entropy differ by more: sampler and learner have different supports."""
    patience: int = Field(3, ge=1)
    """Steps running that a threshold must be passed."""
    clear_patience: int = Field(8, ge=1)
    """Steps running before an alarm ends."""
    acceleration_nats: float = Field(-0.25, lt=0)
    """Acceleration when the lag probe's mean is below this, or below `lag_nats` with one of the signs that follow."""
    grad_norm_mads: float = Field(5.0, gt=0)
    """Sign of acceleration: gradient norm above the baseline's median by so many median absolute deviations."""
    entropy_rise: float = Field(2.0, gt=1)
    """Sign of acceleration: entropy above its recent lowest mean by this factor (and by .2 nats)."""
    baseline_steps: int = Field(20, ge=5)
    """Steps without trouble that make the baseline of gradient norm."""
    collapse_share: float = Field(0.5, gt=0, lt=1)
    """Collapsed when the mean reward is under this share of its running maximum."""
    reward_window: int = Field(8, ge=1)
    """Steps in the mean reward, and steps running that it must stay low."""
    reward_floor: float = Field(0.05, ge=0)
    """A running maximum below this is no reward to lose: the collapse rule waits."""
    nonfinite_steps: int = Field(2, ge=1)
    """Collapsed when the gradient norm was not finite for so many steps running."""
    flat_nats: float = Field(-0.015, lt=0)
    """Stagnation: the lag probe's mean over `share_window` values is below this while reward holds or rises."""
    recover_steps: int = Field(15, ge=1)
    """Steps without trouble until `recovering` becomes `healthy`."""


@dataclass
class Alarm:
    """Something that a person should look at."""

    rule: str
    """`lag`, `fixed`, `share_negative`, `leak`, `acceleration`, `collapse`, `nonfinite` or `dead_batch`."""
    metric: str
    step: int
    """Step at which it was raised."""
    since: int
    """First step at which the sign was seen."""
    phase: str
    seen: str
    """What was seen, in a line, with numbers."""
    sure: Literal["low", "medium", "high"]
    advice: str
    value: float | None = None
    threshold: float | None = None
    cleared: int | None = None
    """Step at which it ended; None while it stands."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class PhaseState:
    """What the monitor says after a step."""

    step: int
    phase: Phase
    since: int
    """Step at which the phase began."""
    alarms: list[Alarm] = field(default_factory=list)
    """Raised at this step."""
    cleared: list[Alarm] = field(default_factory=list)
    """Ended at this step."""
    active: list[Alarm] = field(default_factory=list)
    """All that stand, those of this step included."""


class PhaseMonitor:
    """Feed it the metrics of every step, in order: `update(metrics)`. Metrics that are missing or None are tolerated."""

    SCALARS = ("step", "phase", "since", "best_fixed", "best_reward", "first_reward", "low_entropy", "nonfinite", "dead", "low_reward",
               "low_since", "flat", "calm", "llds_on")  # fmt: skip

    def __init__(self, rules: MonitorRules | None = None):
        r = self.rules = rules or MonitorRules()
        steady = {"patience": r.patience, "leave_patience": r.clear_patience}
        self.watches = {
            "lag": Watch(r.lag_nats, r.lag_clear_nats, window=r.lag_window, **steady),
            "confirm": Watch(r.fixed_drop_nats, 0.8 * r.fixed_drop_nats, window=1, **steady),
            "fixed": Watch(r.fixed_alarm_nats, 0.8 * r.fixed_alarm_nats, window=1, **steady),
            "share_negative": Watch(r.share_negative, 0.9 * r.share_negative, window=r.share_window, **steady),
            "leak": Watch(r.leak_nats, 0.7 * r.leak_nats, window=r.lag_window, **steady),
            "grad_norm": Watch(0.0, -1.0, window=3, patience=r.patience, leave_patience=r.clear_patience),
        }
        self.windows = {
            "fixed": Window(r.lag_window), "reward": Window(r.reward_window), "lag_long": Window(r.share_window),
            "entropy": Window(r.lag_window), "baseline": Window(r.baseline_steps),
        }  # fmt: skip
        self.step, self.phase, self.since = -1, "healthy", 0
        self.best_fixed = self.best_reward = self.first_reward = self.low_entropy = self.low_since = None
        self.nonfinite = self.dead = self.low_reward = self.flat = self.calm = 0
        self.llds_on = False
        self.open: dict[str, Alarm] = {}

    def update(self, metrics: Mapping[str, Any]) -> PhaseState:
        """metrics: the step's, by the names of docs/monitor.md, `step` among them (else steps are counted)."""
        step = int(metrics["step"]) if metrics.get("step") is not None else self.step + 1
        self.step = step
        signs = self._read(step, metrics)
        phase = self._phase(step, signs)
        if phase != self.phase:
            self.phase, self.since = phase, step
        raised, cleared = self._alarms(step, signs)
        return PhaseState(step, self.phase, self.since, raised, cleared, list(self.open.values()))

    # ---- signs

    def _read(self, step: int, metrics: Mapping[str, Any]) -> dict[str, bool]:
        r, w, win = self.rules, self.watches, self.windows
        get = lambda name: _number(metrics.get(name))  # noqa: E731
        w["lag"].update(step, get("probe/lag"))
        win["lag_long"].add(get("probe/lag"))
        if win["fixed"].add(get("probe/fixed")) and win["fixed"].full:
            level = win["fixed"].mean
            self.best_fixed = level if self.best_fixed is None else max(self.best_fixed, level)
            w["confirm"].update(step, self.best_fixed - level)
            w["fixed"].update(step, self.best_fixed - level)
        self.llds_on = self.llds_on or (get("llds/active_tokens") or 0) > 0
        w["share_negative"].update(step, None if self.llds_on else get("displacement/share_negative"))
        w["leak"].update(step, get("leak/logp_entropy"))

        norm, baseline = get("grad_norm"), win["baseline"]
        bad_norm = "grad_norm" in metrics and metrics["grad_norm"] is not None and norm is None
        self.nonfinite = self.nonfinite + 1 if bad_norm else 0
        if norm is not None and baseline.full:
            ordered = sorted(baseline.values)
            middle = ordered[len(ordered) // 2]
            spread = sorted(abs(v - middle) for v in ordered)[len(ordered) // 2]
            w["grad_norm"].update(step, norm - middle - r.grad_norm_mads * max(spread, 0.05 * middle))
        if self.phase not in TROUBLE:
            baseline.add(norm)
        if win["entropy"].add(get("entropy")) and win["entropy"].full:
            level = win["entropy"].mean
            self.low_entropy = level if self.low_entropy is None else min(self.low_entropy, level)
        entropy = win["entropy"].mean if win["entropy"].full else None
        dead = get("groups/zero_variance") == 1.0 and (get("policy/clip_fraction") or 0.0) >= 0.99
        self.dead = self.dead + 1 if dead else 0

        if win["reward"].add(get("reward/mean")) and win["reward"].full:
            mean = win["reward"].mean
            self.first_reward = mean if self.first_reward is None else self.first_reward
            self.best_reward = mean if self.best_reward is None else max(self.best_reward, mean)
            if self.best_reward >= r.reward_floor and mean < r.collapse_share * self.best_reward:
                self.low_since = step if self.low_reward == 0 else self.low_since
                self.low_reward += 1
            elif self.low_reward < r.reward_window or mean > (r.collapse_share + 0.1) * self.best_reward:
                self.low_reward = 0  # once collapsed, a clear rise must show
        lag = w["lag"].mean
        return {
            "nonfinite": self.nonfinite >= r.nonfinite_steps,
            "collapse": self.low_reward >= r.reward_window,
            "steep": lag is not None and lag < r.acceleration_nats,
            "entropy": entropy is not None and entropy > max(r.entropy_rise * self.low_entropy, self.low_entropy + 0.2),
        }

    def _phase(self, step: int, signs: dict[str, bool]) -> Phase:
        r, w = self.rules, self.watches
        falling = w["lag"].active or (w["fixed"].active and w["share_negative"].active) or (
            not w["lag"].window.values and (w["fixed"].active or w["share_negative"].active)
        )  # fmt: skip
        if signs["collapse"] or signs["nonfinite"]:
            self.calm = 0
            return "collapsed"
        if falling:
            self.calm = 0
            still = w["lag"].past or not w["lag"].window.values
            loud = w["grad_norm"].active or w["share_negative"].active or signs["entropy"]
            accelerating = signs["steep"] or (still and loud)
            return "acceleration" if accelerating or self.phase == "acceleration" else "decay"
        if self.phase in TROUBLE or self.phase == "recovering":
            self.calm += 1
            if self.calm <= r.recover_steps:
                return "recovering"
        lag, reward = self.windows["lag_long"], self.windows["reward"]
        holds = reward.full and self.best_reward >= r.reward_floor and reward.mean >= 0.95 * self.best_reward
        gained = holds and reward.mean > self.first_reward
        quiet = lag.full and lag.mean < r.flat_nats and gained
        self.flat = min(self.flat + 1, r.patience) if quiet else max(self.flat - 1, 0)
        return "stagnation" if self.flat >= r.patience or (self.phase == "stagnation" and self.flat > 0) else "healthy"

    # ---- alarms

    def _alarms(self, step: int, signs: dict[str, bool]) -> tuple[list[Alarm], list[Alarm]]:
        w = self.watches
        standing = {
            "lag": w["lag"].active,
            "fixed": w["fixed"].active,
            "share_negative": w["share_negative"].active and (w["confirm"].active or not w["lag"].window.values),
            "leak": w["leak"].active,
            "acceleration": self.phase == "acceleration",
            "collapse": signs["collapse"],
            "nonfinite": signs["nonfinite"],
            "dead_batch": self.dead >= self.rules.patience,
        }
        raised, cleared = [], []
        for rule, stands in standing.items():
            if stands and rule not in self.open:
                self.open[rule] = self._alarm(rule, step)
                raised.append(self.open[rule])
            elif not stands and rule in self.open:
                alarm = self.open.pop(rule)
                alarm.cleared = step
                cleared.append(alarm)
        return raised, cleared

    def _alarm(self, rule: str, step: int) -> Alarm:
        from services.likelihood.advice import describe

        return describe(rule, step, self)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            **{k: getattr(self, k) for k in self.SCALARS},
            "watches": {k: v.state_dict() for k, v in self.watches.items()},
            "windows": {k: v.values for k, v in self.windows.items()},
            "open": {k: v.as_dict() for k, v in self.open.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key in self.SCALARS:
            setattr(self, key, state[key])
        for key, watch in self.watches.items():
            watch.load_state_dict(state["watches"][key])
        for key, window in self.windows.items():
            window.values = list(state["windows"][key])
        self.open = {k: Alarm(**v) for k, v in state["open"].items()}


def _number(value: Any) -> float | None:
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None
