"""Made-up runs for the phase monitor: levels with noise, of known kind. Noise is that of a batch of some 40
to 80 trajectories."""

from __future__ import annotations

import numpy as np

LAG_STEPS = 5


def healthy(seed: int, steps: int = 300, lag_noise: float = 0.03) -> list[dict]:
    """Reward rises and holds; likelihood of earlier right answers rises at first, then holds."""
    rng = np.random.default_rng(seed)
    level = -0.05 + 0.03 * (1 - np.exp(-np.arange(steps) / 20))
    reward = 0.3 + 0.55 * (1 - np.exp(-np.arange(steps) / rng.uniform(6, 40)))
    return series(rng, level, reward, lag_noise=lag_noise)


def fall(
    seed: int, *, begins: int = 100, rate: float, delay: int, depth: float = 3.0, steps: int = 300
) -> tuple[list[dict], int]:
    """From step `begins` likelihood falls by `rate` nats a token and step; reward starts to fall `delay`
    steps later.

    Returns the run and the first step at which the reward's own level (without noise) is 15 % below its best.
    """
    rng = np.random.default_rng(seed)
    at = np.arange(steps)
    level = -0.03 - np.minimum(np.maximum(0, at - begins) * rate, depth)
    reward = 0.3 + 0.55 * (1 - np.exp(-at / 15))
    lost = np.clip((at - begins - delay) / max(10.0, 1.5 * delay), 0, 1)
    reward = reward * (1 - 0.95 * lost)
    best = np.maximum.accumulate(reward)
    run = series(rng, level, reward, share=np.where(at > begins, 0.55, 0.3), entropy=0.15 + 0.4 * lost)
    return run, int(np.argmax(reward < 0.85 * best))


def series(rng, level, reward, *, share=0.3, entropy=0.15, lag_noise: float = 0.03) -> list[dict]:
    n = len(level)
    before = np.concatenate([np.full(LAG_STEPS, level[0] - 0.05), level[:-LAG_STEPS]])
    columns = {
        "reward/mean": np.clip(reward + rng.normal(0, 0.07, n), 0, 1),
        "probe/lag": level - before + rng.normal(0, lag_noise, n),
        "probe/fixed": level + rng.normal(0, 0.01, n),
        "displacement/share_negative": np.clip(share + rng.normal(0, 0.1, n), 0, 1),
        "entropy": np.maximum(0.01, entropy + rng.normal(0, 0.03, n)),
        "grad_norm": rng.lognormal(0, 0.35, n),
        "leak/logp_entropy": np.abs(rng.normal(0, 0.015, n)),
    }
    return [{"step": i, **{k: float(v[i]) for k, v in columns.items()}} for i in range(n)]
