"""Made-up runs that are sick in one way each, and healthy ones with warm-up, learning-rate changes and noise.

All metrics of a step are there. What is said in the name goes wrong from step 100 on; the reward holds.
"""

from __future__ import annotations

import numpy as np

STEPS = 260
BEGINS = 100
LAG_STEPS = 5


def healthy_run(seed: int, steps: int = STEPS) -> dict[str, np.ndarray]:
    """Columns [steps] of a run that learns: levels differ from run to run, so do noise and speed."""
    rng = np.random.default_rng(seed)
    at = np.arange(steps)
    learnt = 1 - np.exp(-at / rng.uniform(10, 50))
    warm = np.minimum(1.0, (at + 1) / rng.integers(1, 20))
    changes = np.ones(steps)
    for change in rng.integers(40, steps, size=2):  # of the learning rate, up or down
        changes[change:] *= rng.choice([0.5, 0.7, 1.5, 2.0])
    level = -0.06 + 0.03 * learnt
    before = np.concatenate([np.full(LAG_STEPS, level[0] - 0.02), level[:-LAG_STEPS]])
    reward = np.clip(0.25 + rng.uniform(0.3, 0.5) * learnt + rng.normal(0, 0.05, steps), 0, 1)
    entropy = rng.uniform(0.25, 0.9) * (1 - 0.6 * learnt)
    searches = rng.uniform(0.9, 1.6) + 0.5 * learnt
    length = rng.uniform(60, 400) * (1 + rng.uniform(-0.2, 0.5) * learnt)
    norm = rng.uniform(0.3, 2.0) * (0.6 + 0.4 * warm) * np.sqrt(changes)
    zero = 0.25 + rng.uniform(0.1, 0.4) * learnt
    normal = rng.normal
    columns = {
        "reward/mean": reward,
        "reward/right": reward,
        "probe/lag": level - before + normal(0, 0.02, steps),
        "probe/fixed": level + normal(0, 0.01, steps),
        "displacement/share_negative": np.clip(0.3 + normal(0, 0.08, steps), 0, 1),
        "leak/logp_entropy": np.abs(normal(0, 0.01, steps)),
        "entropy": np.maximum(0.02, entropy + normal(0, 0.03, steps)),
        "grad_norm": norm * rng.lognormal(0, 0.35, steps),
        "rollout/searches": np.maximum(0, searches + normal(0, 0.1, steps)),
        "rollout/valid": np.clip(0.97 + normal(0, 0.02, steps), 0, 1),
        "rollout/truncated": np.clip(0.03 + normal(0, 0.02, steps), 0, 1),
        "rollout/at_turn_limit": np.clip(0.04 + normal(0, 0.03, steps), 0, 1),
        "rollout/length": np.maximum(5, length * rng.lognormal(0, 0.08, steps)),
        "mismatch/abs_logp": rng.uniform(0.005, 0.02) * rng.lognormal(0, 0.2, steps),
        "groups/zero_variance": np.clip(zero + normal(0, 0.09, steps), 0, 1),
        "retrieval/empty": np.clip(0.02 + normal(0, 0.02, steps), 0, 1),
        "retrieval/repeated": np.clip(0.1 + normal(0, 0.05, steps), 0, 1),
        "text/repetition": np.clip(0.08 + normal(0, 0.02, steps), 0, 1),
        "logp/control": -0.15 + normal(0, 0.03, steps),
        "llds/lambda": np.full(steps, 0.1),
        "llds/active_tokens": rng.uniform(50, 400) * rng.lognormal(0, 0.5, steps),
        "learner/optimiser_steps": np.full(steps, 4.0),
        "llds/min_drop": np.zeros(steps),
    }
    columns["grad_norm/max"] = columns["grad_norm"] * rng.uniform(1.1, 1.8, steps)
    columns["kl/sampler"] = columns["mismatch/abs_logp"] ** 2
    columns["rollout/finished"] = 1 - columns["rollout/truncated"] - columns["rollout/at_turn_limit"]
    evaluated = at % 20 == 0
    score = np.where(evaluated, 0.2 + 0.5 * learnt + normal(0, 0.03, steps), np.nan)
    columns["eval/em_greedy"] = score
    # Drawn last, so that the columns before it are what they were. Some corpora always have bare titles.
    bare = rng.choice([0.0, 0.05, 0.4])
    columns["retrieval/blank"] = np.clip(bare + normal(0, 0.02, steps), 0, 1)
    return columns


def rows(columns: dict[str, np.ndarray]) -> list[dict]:
    """One dictionary per step; what is NaN was not measured."""
    steps = len(columns["reward/mean"])
    return [
        {"step": i, **{k: float(v[i]) for k, v in columns.items() if not np.isnan(v[i])}}
        for i in range(steps)
    ]


def towards(column: np.ndarray, end: float, *, over: int = 80) -> np.ndarray:
    """The column, going from its own level to `end` over some steps (evenly in its logarithm where the end is
    many times the level, or a small part of it)."""
    way = np.clip((np.arange(len(column)) - BEGINS) / over, 0, 1)
    start = np.median(column[40:BEGINS])
    if end > 0 and start > 0 and not 1 / 3 < end / start < 3:
        return column * (end / start) ** way
    return column * (1 - way) + end * way


def sick_run(kind: str, seed: int) -> list[dict]:
    """A run that is sick as `kind` says."""
    c = healthy_run(seed)
    if kind == "gradient":
        c["grad_norm"] = towards(c["grad_norm"], 303)
        c["grad_norm/max"] = towards(c["grad_norm/max"], 400)
    elif kind == "entropy to 6.6":
        c["entropy"] = towards(c["entropy"], 6.6)
    elif kind == "entropy to .001":
        c["entropy"] = towards(c["entropy"], 0.001)
    elif kind == "searches to 0":
        c["rollout/searches"] = towards(c["rollout/searches"], 0)
    elif kind == "searches to the limit":
        c["rollout/searches"] = towards(c["rollout/searches"], 4)
        c["rollout/at_turn_limit"] = towards(c["rollout/at_turn_limit"], 0.9)
    elif kind == "searches to the limit, unexplained":
        c["rollout/searches"] = towards(c["rollout/searches"], 4)
        del c["rollout/at_turn_limit"]
    elif kind == "valid to .1":
        c["rollout/valid"] = towards(c["rollout/valid"], 0.1)
    elif kind == "finished to .1":
        c["rollout/finished"] = towards(c["rollout/finished"], 0.1)
        del c["rollout/truncated"]
    elif kind == "mismatch":
        c["mismatch/abs_logp"] = towards(c["mismatch/abs_logp"], 1.7)
        c["kl/sampler"] = towards(c["kl/sampler"], 1.2)
    elif kind == "groups without variance":
        c["groups/zero_variance"] = towards(c["groups/zero_variance"], 0.96)
    elif kind == "groups that are all right":
        c["groups/zero_variance"] = towards(c["groups/zero_variance"], 0.96)
        c["reward/mean"] = c["reward/right"] = towards(c["reward/mean"], 0.97)
    elif kind == "truncation":
        c["rollout/truncated"] = towards(c["rollout/truncated"], 0.8)
        c["rollout/finished"] = 1 - c["rollout/truncated"] - c["rollout/at_turn_limit"]
    elif kind == "length x 6":
        c["rollout/length"] = towards(c["rollout/length"], 6 * np.median(c["rollout/length"][40:BEGINS]))
    elif kind == "length / 6":
        c["rollout/length"] = towards(c["rollout/length"], np.median(c["rollout/length"][40:BEGINS]) / 6)
    elif kind == "reward gap":
        at = np.arange(STEPS)
        c["eval/em_greedy"] = np.where(
            at > BEGINS, c["eval/em_greedy"] - (at - BEGINS) * 0.003, c["eval/em_greedy"]
        )
        c["reward/mean"] = np.clip(c["reward/mean"] + np.maximum(0, at - BEGINS) * 0.001, 0, 1)
    elif kind == "llds without active tokens":
        c["llds/active_tokens"][BEGINS:] = 0
        c["learner/optimiser_steps"][BEGINS:] = 1
    elif kind == "no documents":
        c["retrieval/empty"] = towards(c["retrieval/empty"], 0.9)
    elif kind == "titles alone":
        c["retrieval/blank"] = towards(c["retrieval/blank"], 0.95)
    elif kind == "the same documents":
        c["retrieval/repeated"] = towards(c["retrieval/repeated"], 0.9)
    elif kind == "garbage":
        c["text/repetition"] = towards(c["text/repetition"], 0.7)
    elif kind == "control tokens":
        c["logp/control"] = towards(c["logp/control"], -3)
    else:
        raise ValueError(kind)
    return rows(c)
