"""What an alarm says: what was seen, how sure it is, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.likelihood.monitor import Alarm

if TYPE_CHECKING:
    from services.likelihood.monitor import PhaseMonitor

HOLD = "Switch LLDS on or raise algorithm.llds.lambda, halve learner.lr, or go back to a checkpoint from before step {since}."
ADVICE = {
    "lag": HOLD,
    "fixed": HOLD,
    "share_negative": HOLD,
    "acceleration": "Stop or roll back to a checkpoint from before step {since}: from here a fall usually ends in collapse. Then a lower learner.lr.",
    "collapse": "Roll back to a checkpoint from before the likelihood alarm and lower learner.lr; going on from here rarely helps.",
    "leak": "Look for what keeps tokens from being sampled but not from being learnt: padded vocabulary rows, bad_words, min_tokens, allowed ids, "
    "top-k, top-p, min-p. Mask them in the learner too, or switch them off.",
    "nonfinite": "Steps without a finite gradient norm are skipped, so nothing is learnt. Look at ratio/max and mismatch/abs_logp; lower learner.lr.",
    "dead_batch": "Every group has equal rewards and nearly all ratios are clipped: nothing is learnt. Look at the reward and at the data; resume from an earlier checkpoint.",
}
METRIC = {
    "lag": "probe/lag",
    "fixed": "probe/fixed",
    "share_negative": "displacement/share_negative",
    "leak": "leak/logp_entropy",
    "acceleration": "probe/lag",
    "collapse": "reward/mean",
    "nonfinite": "grad_norm",
    "dead_batch": "groups/zero_variance",
}


def describe(rule: str, step: int, monitor: PhaseMonitor) -> Alarm:
    """The alarm of a rule that has just become true."""
    r, w = monitor.rules, monitor.watches
    lag, share = w["lag"], w["share_negative"]
    drop = w["confirm"].mean
    signs = {
        "the fixed probe is {:.2f} nats below its best": drop if w["confirm"].active else None,
        "{:.0%} of preserved answers fall at each update": share.mean if share.active else None,
        "the gradient norm is far above its baseline": 0.0 if w["grad_norm"].active else None,
    }
    others = [text.format(value) for text, value in signs.items() if value is not None]
    since, value, threshold, sure = step, None, None, "high"
    if rule == "lag":
        since, value, threshold = lag.since, lag.mean, r.lag_nats
        seen = f"right answers of a few steps ago have lost {-value:.3f} nats a token (mean of {r.lag_window} probes; alarm at {-threshold:g})"
        sure = "high" if others or value < 1.5 * threshold else "medium"
    elif rule == "fixed":
        since, value, threshold = w["fixed"].since, drop, r.fixed_alarm_nats
        seen = f"the frozen right answers are {value:.3f} nats a token below their best (alarm at {threshold:g})"
        sure, others = ("high" if lag.active else "medium"), others[1:]
    elif rule == "share_negative":
        since, value, threshold = share.since, share.mean, r.share_negative
        seen = f"{value:.0%} of the answers with advantage >= 0 lose likelihood at each update (mean of {r.share_window}; alarm at {threshold:.0%})"
        sure, others = ("medium" if w["confirm"].active else "low"), others[:1]
    elif rule == "leak":
        since, value, threshold = w["leak"].since, w["leak"].mean, r.leak_nats
        seen = f"sampled tokens are {value:.3f} nats more or less surprising than the learner's entropy says (alarm at {threshold:g})"
    elif rule == "acceleration":
        since, value, threshold = (lag.since if lag.active else step), lag.mean, r.acceleration_nats
        seen = "the fall of likelihood speeds up" + (f": {-value:.3f} nats a token between probes" if value is not None else "")
        sure = "high" if others or (value is not None and value < threshold) else "medium"
    elif rule == "collapse":
        since, value, threshold = monitor.low_since, monitor.windows["reward"].mean, r.collapse_share * monitor.best_reward
        seen = f"mean reward {value:.3f} is under {r.collapse_share:.0%} of its best, {monitor.best_reward:.3f}, for {monitor.low_reward} steps"
    elif rule == "nonfinite":
        since = step - monitor.nonfinite + 1
        seen = f"the gradient norm is not finite, {monitor.nonfinite} steps running"
    else:
        since, value, threshold = step - monitor.dead + 1, 1.0, 1.0
        seen = f"no group has two different rewards and at least 99 % of ratios are clipped, {monitor.dead} steps running"
    if others and rule in ("lag", "share_negative", "acceleration", "fixed"):
        seen += "; " + "; ".join(others)
    return Alarm(
        rule=rule, metric=METRIC[rule], step=step, since=since, phase=monitor.phase, seen=seen, sure=sure,
        advice=ADVICE[rule].format(since=since), value=value, threshold=threshold,
    )  # fmt: skip
