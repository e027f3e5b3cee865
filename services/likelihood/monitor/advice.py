"""What an alarm says: what was seen, how sure it is, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from services.likelihood.monitor.alarms import Alarm, Rule
from services.likelihood.monitor.watch import Watch, Window
from services.settings import MonitorRules

ADVICE: dict[Rule, str] = {
    "likelihood": "Switch LLDS on or raise algorithm.llds.lambda, halve learner.lr, or go back to a checkpoint from before step {since}.",
    "acceleration": "Stop, or roll back to a checkpoint from before step {since}, and lower learner.lr: from here a fall usually ends in collapse.",
    "collapse": "Roll back to a checkpoint from before the likelihood alarm and lower learner.lr; going on from here rarely helps.",
    "leak": "Look for what keeps tokens from being sampled but not from being learnt: padded vocabulary rows, bad_words, min_tokens, "
    "allowed ids, top-k, top-p, min-p. Mask them in the learner too, or switch them off.",
    "nonfinite": "Steps without a finite gradient norm are skipped, so nothing is learnt. Look at ratio/max and mismatch/abs_logp; lower learner.lr.",
    "no_reward": "Nothing is learnt from such a step, and nothing is wrong with the model: ask whether what the reward function calls (a "
    "judge, a service) is up, and what it answers. The run goes on; a reward that comes back clears this.",
    "dead_batch": "Nothing is learnt. Read some trajectories: a model that does not write the tags needs a warm start (unspiral warm-start). "
    "Look at the reward function and the data; after a fall, resume from an earlier checkpoint.",
}


class Signs(Protocol):
    """What the monitor has seen up to a step."""

    rules: MonitorRules
    watches: Mapping[str, Watch]
    windows: Mapping[str, Window]
    open: Mapping[str, Alarm]
    step: int
    phase: str
    best_reward: float | None
    low_since: int | None
    low_reward: int
    nonfinite: int
    dead: int
    unrewarded: int

    @property
    def poor(self) -> bool:
        """Whether rewards are low."""


def signs(monitor: Signs) -> dict[str, str]:
    """The signs of falling likelihood that show now, by metric, in words."""
    r, w = monitor.rules, monitor.watches
    texts = {
        "probe/lag": (
            "lag",
            f"right answers of a few steps ago have lost {{:.3f}} nats a token (mean of {r.lag_window}; alarm at {-r.lag_nats:g})",
        ),
        "probe/fixed": (
            "fixed",
            f"the frozen right answers are {{:.3f}} nats a token below their best (sign at {r.fixed_drop_nats:g})",
        ),
        "displacement/share_negative": (
            "share_negative",
            f"{{:.0%}} of the answers with advantage >= 0 lose likelihood at each update (mean of {r.share_window}; sign at {r.share_negative:.0%})",
        ),
        "grad_norm": ("grad_norm", "the gradient norm is far above its baseline"),
        "entropy": ("entropy", "entropy is {:.2f} nats above its recent lowest"),
    }
    return {
        metric: text.format(abs(w[name].mean)) for metric, (name, text) in texts.items() if w[name].active
    }


def confidence(rule: Rule, monitor: Signs) -> Literal["low", "medium", "high"]:
    """High: two independent signs agree, or one is far past its threshold. Low: the share of falling
    responses alone, without probes."""
    if rule not in ("likelihood", "acceleration"):
        return "high"
    lag = monitor.watches["lag"]
    far = lag.active and lag.mean < 1.5 * monitor.rules.lag_nats
    if far or len(signs(monitor)) > 1:
        return "high"
    return "medium" if lag.active or monitor.watches["fixed"].active else "low"


def describe(rule: Rule, monitor: Signs) -> Alarm:
    """The alarm of a rule that has just become true."""
    r, w, step = monitor.rules, monitor.watches, monitor.step
    value: float | None = None
    threshold: float | None = None
    if rule in ("likelihood", "acceleration"):
        shown = signs(monitor)
        metric = next(iter(shown), "probe/lag")
        watch = w[metric.split("/")[-1]]
        since, value, threshold = watch.since, watch.mean, watch.enter
        seen = "; ".join(shown.values())
        if rule == "acceleration":
            started = monitor.open.get("likelihood")
            since, threshold = (started.since if started else since), r.acceleration_nats
            seen = (
                "the fall is already fast"
                if started and started.step == step
                else f"the fall speeds up: {seen}"
            )
    elif rule == "collapse":
        metric, since, value, threshold = (
            "reward/mean",
            monitor.low_since,
            monitor.windows["reward"].mean,
            r.collapse_share * monitor.best_reward,
        )
        seen = f"mean reward {value:.3f} is under {r.collapse_share:.0%} of its best, {monitor.best_reward:.3f}, for {monitor.low_reward} steps"
    elif rule == "leak":
        metric, since, value, threshold = "leak/logp_entropy", w["leak"].since, w["leak"].mean, r.leak_nats
        seen = f"the surprise of sampled tokens and the learner's entropy differ by {value:.3f} nats (mean of {r.lag_window}; alarm at {threshold:g})"
    elif rule == "nonfinite":
        metric, since = "grad_norm", step - monitor.nonfinite + 1
        seen = f"the gradient norm is not finite, {monitor.nonfinite} steps running"
    elif rule == "no_reward":
        metric, since = "reward/missing", step - monitor.unrewarded + 1
        seen = "no trajectory of the step has a reward"
    else:
        metric, since = "groups/zero_variance", step - monitor.dead + 1
        why = (
            f"mean reward is {monitor.windows['reward'].mean:.3f}"
            if monitor.poor
            else f"at least {r.dead_clip_fraction:.0%} of ratios are clipped"
        )
        seen = f"no group has two different rewards and {why}, {monitor.dead} steps running"
    return Alarm(
        rule=rule, metric=metric, step=step, since=since, phase=monitor.phase, seen=seen, sure=confidence(rule, monitor),
        advice=ADVICE[rule].format(since=since), value=value, threshold=threshold,
    )  # fmt: skip
