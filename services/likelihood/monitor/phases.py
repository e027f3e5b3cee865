"""The phase monitor: names the phase that a run is in and raises alarms, from likelihood before reward.

A pure state machine over the metrics of each step: no clock, no I/O, so that it replays over any recorded
run. The order of phases is that of arXiv 2512.04220 (I stagnation, II decay, III acceleration, collapse); the
paper gives no numeric rule, so the rules are ours. They feed on the *lag probe*: right trajectories of some
steps ago, scored again under the weights of now. The batch's own right
samples are survivors: their log-prob stays high while that of earlier right answers decays. Reward decides
over `collapsed` alone, and over the name `stagnation`, which raises no alarm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.likelihood.monitor.advice import confidence, describe
from services.likelihood.monitor.alarms import TROUBLE, Alarm, Phase, Rule
from services.likelihood.monitor.watch import Peak, Watch, Window
from services.settings import MonitorRules


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
    """Feed it the metrics of every step, in order: `update(metrics)`. Metrics that are missing or None are
    tolerated."""

    SCALARS = ("step", "phase", "since", "best_reward", "first_reward", "nonfinite", "dead", "low_reward", "low_since",
               "flat", "calm", "fast", "unrewarded")  # fmt: skip

    def __init__(self, rules: MonitorRules | None = None):
        r = self.rules = rules or MonitorRules()
        steady = {"patience": r.patience, "leave_patience": r.clear_patience}
        self.watches = {
            "lag": Watch(r.lag_nats, r.lag_clear_nats, window=r.lag_window, **steady),
            "slow": Watch(
                r.flat_nats, r.flat_nats / 3, window=r.share_window, **steady
            ),  # of the lag probe too
            "fixed": Watch(r.fixed_drop_nats, 0.7 * r.fixed_drop_nats, window=1, **steady),
            "share_negative": Watch(
                r.share_negative, 0.9 * r.share_negative, window=r.share_window, **steady
            ),
            "leak": Watch(r.leak_nats, 0.7 * r.leak_nats, window=r.lag_window, **steady),
            "grad_norm": Watch(0.0, -1e-9, window=3, **steady),
            "entropy": Watch(r.entropy_rise_nats, 0.7 * r.entropy_rise_nats, window=1, **steady),
        }
        self.windows = {
            "fixed": Window(r.lag_window), "reward": Window(r.reward_window), "entropy": Window(r.lag_window), "baseline": Window(r.baseline_steps),
            "lag_noise": Window(2 * r.baseline_steps),
        }  # fmt: skip
        self.peaks = {"fixed": Peak(r.memory_steps), "entropy": Peak(r.memory_steps)}
        self.step, self.phase, self.since = -1, "healthy", 0
        self.best_reward = self.first_reward = self.low_since = None
        self.nonfinite = self.dead = self.low_reward = self.flat = self.calm = self.fast = 0
        self.unrewarded = 0
        self.open: dict[str, Alarm] = {}

    def update(self, metrics: Mapping[str, Any]) -> PhaseState:
        """metrics: the step's, by the names of docs/monitor.md, `step` among them (else steps are
        counted)."""
        step = int(metrics["step"]) if metrics.get("step") is not None else self.step + 1
        self.step = step
        self._read(step, metrics)
        phase = self._next_phase()
        if phase != self.phase:
            self.phase, self.since = phase, step
        raised, cleared = self._alarms(step)
        return PhaseState(step, self.phase, self.since, raised, cleared, list(self.open.values()))

    # ---- signs

    @property
    def probed(self) -> bool:
        """The lag probe has been seen at all: without it the other signs must do."""
        return bool(self.watches["lag"].window.values)

    @property
    def falling(self) -> bool:
        """The likelihood of right answers falls: the sign of decay."""
        w = self.watches
        if not self.probed:
            return w["fixed"].active or w["share_negative"].active
        return w["lag"].active or (w["fixed"].active and (w["slow"].active or w["share_negative"].active))

    @property
    def poor(self) -> bool:
        """There is hardly a reward: groups without two different ones are then all wrong, not all right."""
        reward = self.windows["reward"]
        return reward.full and reward.mean <= self.rules.reward_floor

    @property
    def collapsed(self) -> bool:
        return self.low_reward >= self.rules.reward_window

    def _read(self, step: int, metrics: Mapping[str, Any]) -> None:
        r, w, windows = self.rules, self.watches, self.windows
        value = {name: _number(metrics.get(name)) for name in metrics}.get
        if self.phase not in TROUBLE:
            windows["lag_noise"].add(value("probe/lag"))
        w["lag"].enter = min(r.lag_nats, -r.lag_sigmas * windows["lag_noise"].noise / math.sqrt(r.lag_window))
        w["lag"].update(step, value("probe/lag"))
        w["slow"].update(step, value("probe/lag"))
        if windows["fixed"].add(value("probe/fixed")) and windows["fixed"].full:
            level = windows["fixed"].mean
            w["fixed"].update(step, self.peaks["fixed"].highest(step, level) - level)
        llds = value("llds/lambda") if "llds/lambda" in metrics else value("llds/active_tokens")
        w["share_negative"].update(step, None if llds else value("displacement/share_negative"))
        w["leak"].update(step, value("leak/logp_entropy"))
        if windows["entropy"].add(value("entropy")) and windows["entropy"].full:
            level = windows["entropy"].mean
            w["entropy"].update(step, level + self.peaks["entropy"].highest(step, -level))

        self.unrewarded = self.unrewarded + 1 if _no_reward(metrics) else 0
        norm, baseline = value("grad_norm"), windows["baseline"]
        if (
            "grad_norm" in metrics and not self.unrewarded
        ):  # otherwise no step was due: neither a good sign nor a bad one
            self.nonfinite = self.nonfinite + 1 if norm is None else 0
        if norm is not None and baseline.full:
            middle = baseline.median
            spread = max(baseline.deviation, 0.05 * middle)
            w["grad_norm"].update(step, norm - middle - r.grad_norm_mads * spread)
        if self.phase not in TROUBLE:
            baseline.add(norm)

        if windows["reward"].add(value("reward/mean")) and windows["reward"].full:
            mean = windows["reward"].mean
            self.first_reward = mean if self.first_reward is None else self.first_reward
            self.best_reward = mean if self.best_reward is None else max(self.best_reward, mean)
            if self.best_reward >= r.reward_floor and mean < r.collapse_share * self.best_reward:
                self.low_since = step if self.low_reward == 0 else self.low_since
                self.low_reward += 1
            elif not self.collapsed or mean > (r.collapse_share + 0.1) * self.best_reward:
                self.low_reward = 0  # once collapsed, a clear rise must show

        equal = value("groups/zero_variance")
        if equal is not None and not self.unrewarded:
            useless = self.poor or (value("policy/clip_fraction") or 0.0) >= r.dead_clip_fraction
            self.dead = self.dead + 1 if equal == 1.0 and useless else 0

    def _next_phase(self) -> Phase:
        r, w = self.rules, self.watches
        if self.collapsed or self.nonfinite >= r.nonfinite_steps:
            self.calm = 0
            return "collapsed"
        if self.falling:
            self.calm = 0
            lag = w["lag"].mean
            steep = lag is not None and lag < r.acceleration_nats
            still = w["lag"].past or not self.probed
            loud = (
                w["grad_norm"].active or w["entropy"].active or (w["share_negative"].active and self.probed)
            )
            self.fast = r.clear_patience if steep or (still and loud) else max(0, self.fast - 1)
            return "acceleration" if self.fast else "decay"
        self.fast = 0
        if self.phase in TROUBLE or self.phase == "recovering":
            self.calm += 1
            if self.calm <= r.recover_steps or w["slow"].active:
                return "recovering"
        reward = self.windows["reward"]
        holds = (
            reward.full and reward.mean >= r.hold_share * self.best_reward and reward.mean > self.first_reward
        )
        self.flat = min(self.flat + 1, r.patience) if w["slow"].active and holds else max(self.flat - 1, 0)
        return (
            "stagnation"
            if self.flat >= r.patience or (self.phase == "stagnation" and self.flat > 0)
            else "healthy"
        )

    # ---- alarms

    def _alarms(self, step: int) -> tuple[list[Alarm], list[Alarm]]:
        sinking = self.falling or self.phase == "collapsed"  # an alarm once raised stands through both
        rules: dict[Rule, bool] = {
            "likelihood": self.falling or (sinking and "likelihood" in self.open),
            "acceleration": self.phase == "acceleration" or (sinking and "acceleration" in self.open),
            "collapse": self.collapsed,
            "leak": self.watches["leak"].active,
            "nonfinite": self.nonfinite >= self.rules.nonfinite_steps,
            "dead_batch": self.dead >= self.rules.patience,
            "no_reward": self.unrewarded > 0,
        }
        raised, cleared = [], []
        for rule, stands in rules.items():
            if stands and rule not in self.open:
                self.open[rule] = describe(rule, self)
                raised.append(self.open[rule])
            elif stands:
                self.open[rule].sure = max(
                    self.open[rule].sure, confidence(rule, self), key=("low", "medium", "high").index
                )
            elif rule in self.open:
                alarm = self.open.pop(rule)
                alarm.cleared = step
                cleared.append(alarm)
        return raised, cleared

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            **{k: getattr(self, k) for k in self.SCALARS},
            "watches": {k: v.state_dict() for k, v in self.watches.items()},
            "windows": {k: v.values for k, v in self.windows.items()},
            "peaks": {k: v.values for k, v in self.peaks.items()},
            "open": {k: v.as_dict() for k, v in self.open.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key in self.SCALARS:
            setattr(self, key, state.get(key, getattr(self, key)))  # a state of an earlier day has fewer
        for key, watch in self.watches.items():
            watch.load_state_dict(state["watches"][key])
        for kind in ("windows", "peaks"):
            for key, held in getattr(self, kind).items():
                held.values = list(state[kind][key])
        self.open = {k: Alarm(**v) for k, v in state["open"].items()}


def _no_reward(metrics: Mapping[str, Any]) -> bool:
    """None of the step's trajectories has a reward. A trainer that posts no rewards at all does not say
    so."""
    missing = (_number(metrics.get("reward/missing")) or 0.0) > 0
    return _number(metrics.get("reward/mean")) is None and ("reward/mean" in metrics or missing)


def _number(value: Any) -> float | None:
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None
