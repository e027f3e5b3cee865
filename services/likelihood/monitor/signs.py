"""The signs of falling likelihood, which the phase and the detectors `likelihood` and `acceleration` share.

They feed on the *lag probe*: right trajectories of some steps ago, scored again under the weights of now. The
batch's own right samples are survivors: their log-prob stays high while that of earlier right answers decays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.counting import counted
from services.likelihood.monitor.readings import Freshness
from services.likelihood.monitor.watch import Peak, Watch, Window, number
from services.settings import MonitorRules

READS = ("probe/lag", "probe/fixed", "displacement/share_negative")
LOUD = ("grad_norm", "entropy")
"""Further signs, which tell decay from acceleration."""


class Signs:
    """Watches over the probes, the share of falling answers, gradient norm and entropy."""

    def __init__(self, rules: MonitorRules):
        r = self.rules = rules
        steady = {"patience": r.patience, "leave_patience": r.clear_patience}
        self.watches = {
            "lag": Watch(r.lag_nats, r.lag_clear_nats, window=r.lag_window, **steady),
            # Of the lag probe too: a loss so large that two readings in a row say it, with no window to fill.
            "plunge": Watch(
                r.plunge_nats, r.lag_clear_nats, window=1, patience=2, leave_patience=r.clear_patience
            ),
            # And over a longer window: the slow slip that is no decay yet.
            "slow": Watch(r.flat_nats, r.flat_nats / 3, window=r.share_window, **steady),
            "fixed": Watch(r.fixed_drop_nats, 0.7 * r.fixed_drop_nats, window=1, **steady),
            "share_negative": Watch(
                r.share_negative, 0.9 * r.share_negative, window=r.share_window, **steady
            ),
            # Fed with the distance above its own threshold, which moves with the baseline: 0 is that
            # threshold.
            "grad_norm": Watch(0.0, -1e-9, window=3, **steady),
            "entropy": Watch(r.entropy_rise_nats, 0.7 * r.entropy_rise_nats, window=1, **steady),
        }
        self.windows = {
            "fixed": Window(r.lag_window),
            "entropy": Window(r.lag_window),
            "baseline": Window(r.baseline_steps),
            "lag_noise": Window(2 * r.baseline_steps),
        }
        self.seen = {
            name: Freshness(size, r.silence_steps, moving=True)
            for name, size in (("lag", r.lag_window), ("fixed", r.lag_window), ("share", r.share_window))
        }
        self.seen["reward"] = Freshness(r.reward_window, r.silence_steps)
        self.peaks = {"fixed": Peak(r.memory_steps), "entropy": Peak(r.memory_steps)}
        self.settled: float | None = None
        """The best level of the fixed probe since an alarm ended; None once it fell from there too, or
        `memory_steps` later, when its best of before is forgotten."""
        self.settled_at = 0

    @property
    def probed(self) -> bool:
        """The lag probe has been seen lately; without it the other signs must do."""
        return self.seen["lag"].fresh

    @property
    def judged(self) -> bool:
        """What `healthy` needs has been seen, and lately: one sign of likelihood and the reward, for a full
        window each, with two different values at least."""
        of_likelihood = any(self.seen[name].earned for name in ("lag", "fixed", "share"))
        return of_likelihood and self.seen["reward"].earned

    def waits_for(self) -> str | None:
        """Why no sign of likelihood has been seen for long enough to be judged; None where one has."""
        names = {"lag": "probe/lag", "fixed": "probe/fixed", "share": "displacement/share_negative"}
        if any(self.seen[key].earned for key in names):
            return None
        known = {key: self.seen[key] for key in names if self.seen[key].count}
        if not known:
            return f"no value of {' or '.join(names.values())} that says something"
        # The one that is nearest.
        key, sign = min(known.items(), key=lambda one: one[1].needed - one[1].count)
        if sign.count < sign.needed:
            return f"{counted(sign.count, 'value')} of {names[key]}, and {sign.needed} are needed"
        return f"{names[key]} says nothing new" + ("" if sign.last is None else f" since step {sign.last}")

    @property
    def falling(self) -> bool:
        """The likelihood of right answers falls: the sign of decay."""
        w = self.watches
        fixed = w["fixed"].active and self.settled is None
        # A fall that the lag probe has named goes on until the probe says otherwise: silence ends nothing.
        named = w["lag"].active or w["plunge"].active
        if not self.probed:
            return named or fixed or w["share_negative"].active
        return named or (fixed and (w["slow"].active or w["share_negative"].active))

    @property
    def fast(self) -> bool:
        """The fall is steep, or one more sign agrees with it."""
        w = self.watches
        lag = w["lag"].mean
        steep = lag is not None and lag < self.rules.acceleration_nats
        # A lag alarm stands for some steps after the fall has ended: the other signs count only while it goes
        # on.
        still = w["lag"].past or not self.probed
        loud = w["grad_norm"].active or w["entropy"].active or (w["share_negative"].active and self.probed)
        return steep or w["plunge"].active or (still and loud)

    def update(self, step: int, metrics: Mapping[str, Any], *, in_trouble: bool) -> None:
        """in_trouble: the phase before this step was one of TROUBLE, so that its values make no baseline."""
        r = self.rules
        self.seen["reward"].update(step, number(metrics.get("reward/mean")))
        lag = number(metrics.get("probe/lag"))
        self.seen["lag"].update(step, lag)
        self._read_lag(step, lag, in_trouble)
        self.seen["fixed"].update(step, number(metrics.get("probe/fixed")))
        level = self._level("fixed", metrics.get("probe/fixed"))
        if level is not None:
            self.watches["fixed"].update(step, self.peaks["fixed"].highest(step, level) - level)
            if self.settled is not None:
                self.settled = max(self.settled, level)
                fell = self.settled - level > min(-r.lag_nats, r.fixed_drop_nats)
                if fell or step - self.settled_at >= r.memory_steps:
                    self.settled = None
        # LLDS holds this share low by its nature, so it says nothing where LLDS is on.
        llds = number(metrics.get("llds/lambda" if "llds/lambda" in metrics else "llds/active_tokens"))
        share = number(metrics.get("displacement/share_negative"))
        self.watches["share_negative"].update(step, None if llds else share)
        self.seen["share"].update(step, None if llds else share)
        level = self._level("entropy", metrics.get("entropy"))
        if level is not None:
            # Of the negative level, so that the peak is the lowest entropy: what counts is the rise from
            # there.
            self.watches["entropy"].update(step, level + self.peaks["entropy"].highest(step, -level))
        norm = number(metrics.get("grad_norm"))
        baseline = self.windows["baseline"]
        if norm is not None and baseline.full:
            middle = baseline.median
            # A very steady norm has next to no deviation: each step would be "far above".
            spread = max(baseline.deviation, 0.05 * middle)
            self.watches["grad_norm"].update(step, norm - middle - r.grad_norm_mads * spread)
        # A norm of a falling run would become its own baseline.
        if not in_trouble:
            baseline.add(norm)

    def take_up(self, step: int, rewards: Sequence[float]) -> None:
        """After the state of an earlier version: what its windows hold has been seen."""
        windows = {
            "lag": self.watches["lag"].window.values,
            "fixed": self.windows["fixed"].values,
            "share": self.watches["share_negative"].window.values,
            "reward": rewards,
        }
        for name, values in windows.items():
            self.seen[name].take_up(step, values)

    def again(self) -> None:
        """The steps went back: what `healthy` needs must be seen anew."""
        for sign in self.seen.values():
            sign.again()

    def settle(self, step: int) -> None:
        """An alarm has ended. The frozen answers keep what they have lost, and stay below their best for
        `memory_steps`: that is one loss and not a second one. They are a sign again once they have lost as
        much more as a lag alarm or a drop needs, whichever is less, and in any case after `memory_steps`."""
        self.settled = self.windows["fixed"].full_mean
        self.settled_at = step

    def _read_lag(self, step: int, lag: float | None, in_trouble: bool) -> None:
        r = self.rules
        noise = self.windows["lag_noise"]
        if not in_trouble:
            noise.add(lag)
        # A noisy probe (few trajectories) must be below 0 by several standard errors of its mean.
        self.watches["lag"].enter = min(r.lag_nats, -r.lag_sigmas * noise.noise / math.sqrt(r.lag_window))
        self.watches["lag"].update(step, lag)
        self.watches["plunge"].enter = min(r.plunge_nats, -r.lag_sigmas * noise.noise)
        self.watches["plunge"].update(step, lag)
        self.watches["slow"].update(step, lag)

    def _level(self, name: str, value: Any) -> float | None:
        """The mean of the window where this step added to it, and it is full."""
        window = self.windows[name]
        return window.full_mean if window.add(number(value)) else None

    def in_words(self) -> dict[str, str]:
        """The signs that show now, by metric."""
        r = self.rules
        texts = {
            "probe/lag": (
                "lag",
                f"right answers of a few steps ago have lost {{:.3f}} nats a token (mean of {r.lag_window}; "
                f"alarm at {-r.lag_nats:g})",
            ),
            "probe/fixed": (
                "fixed",
                "the frozen right answers are {:.3f} nats a token below their best "
                f"(sign at {r.fixed_drop_nats:g})",
            ),
            "displacement/share_negative": (
                "share_negative",
                "{:.0%} of the answers with advantage >= 0 lose likelihood at each update "
                f"(mean of {r.share_window}; sign at {r.share_negative:.0%})",
            ),
            "grad_norm": ("grad_norm", "the gradient norm is far above its baseline"),
            "entropy": ("entropy", "entropy is {:.2f} nats above its recent lowest"),
        }
        if self._of_lag == "plunge":
            texts["probe/lag"] = (
                "plunge",
                "right answers of a few steps ago have lost {:.3f} nats a token (two readings in a row below "
                f"{self.rules.plunge_nats:g})",
            )
        return {
            metric: text.format(abs(self.watches[name].mean or 0.0))
            for metric, (name, text) in texts.items()
            if self.watches[name].active
        }

    def watch_of(self, metric: str) -> Watch:
        """The watch behind a sign of `in_words`."""
        return self.watches[self._of_lag if metric == "probe/lag" else metric.split("/")[-1]]

    @property
    def _of_lag(self) -> str:
        """The watch that speaks of the lag probe: the plunge's while the mean is not past its threshold."""
        return "plunge" if self.watches["plunge"].active and not self.watches["lag"].active else "lag"

    def state_dict(self) -> dict[str, Any]:
        return {
            "watches": {k: v.state_dict() for k, v in self.watches.items()},
            "windows": {k: v.values for k, v in self.windows.items()},
            "peaks": {k: v.values for k, v in self.peaks.items()},
            "seen": {k: v.state_dict() for k, v in self.seen.items()},
            "settled": self.settled,
            "settled_at": self.settled_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key, watch in self.watches.items():
            if key in state["watches"]:  # earlier versions had no plunge
                watch.load_state_dict(state["watches"][key])
        for key, window in self.windows.items():
            window.values = list(state["windows"][key])
        for key, peak in self.peaks.items():
            peak.values = [(int(step), float(value)) for step, value in state["peaks"][key]]
        for key, seen in state.get("seen", {}).items():  # earlier versions had none: `take_up`
            self.seen[key].load_state_dict(seen)
        self.settled = state.get("settled")  # earlier versions kept none
        self.settled_at = state.get("settled_at", 0)
