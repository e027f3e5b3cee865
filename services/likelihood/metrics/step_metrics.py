"""The metrics of one training step that concern likelihood, in plain NumPy.

All of them are means over *their own* tokens: right, untrained and wrong trajectories
(services.likelihood.metrics.verdicts) are never divided by a common count, which would let the class sizes of
a step move the curves. A trajectory without a reward, which has left the losses, is in none of them.
Displacement is `log-prob after the update - before` (arXiv 2512.04220, section 3): negative means that the
update made the trajectory less likely. A value that cannot be computed (no right trajectory in the step, say)
is left out of the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from services.contracts import TokenBatch, Trajectory
from services.likelihood.metrics.action_table import ActionTable
from services.likelihood.metrics.verdicts import Verdict, is_right, known_rewards, verdicts
from services.likelihood.records import TrajectoryRecord

MAX_ACTION_CURVES = 8
"""Actions of a trajectory that get a curve of their own."""
MAX_ROUND_CURVES = 8
CLASSES = {"right": Verdict.RIGHT, "untrained": Verdict.UNTRAINED, "wrong": Verdict.WRONG}


def likelihood_metrics(table: ActionTable, verdict: np.ndarray) -> dict[str, float]:
    """`logp/right|untrained|wrong` and `logp/right_action_0..`, `logp/wrong_action_0..`: mean log-prob a
    token before the update. `logp/wrong_p10|p50|p90`: quantiles over wrong answers of their mean.

    verdict: int [B], of `Verdict`.
    """
    of_action = verdict[table.row]
    out = {}
    for name, value in CLASSES.items():
        chosen = of_action == value
        out[f"logp/{name}"] = table.mean_per_token(table.before, chosen)
        if name == "untrained":
            continue
        for k in range(min(int(table.index.max(initial=-1)) + 1, MAX_ACTION_CURVES)):
            out[f"logp/{name}_action_{k}"] = table.mean_per_token(table.before, chosen & (table.index == k))
    wrong = of_action == Verdict.WRONG
    tokens = table.per_row(np.where(wrong, table.tokens, 0))
    sums = table.per_row(np.where(wrong, table.before, 0.0))
    out |= _quantiles("logp/wrong_p", sums[tokens > 0] / tokens[tokens > 0], (10, 50, 90))
    return _known(out)


def displacement_metrics(table: ActionTable, advantages: np.ndarray, verdict: np.ndarray) -> dict[str, float]:
    """What the update did to the likelihood of the preserved set, advantage >= 0 (groups without variance are
    counted, as in LLDS).

    `displacement/mean`: nats per token. `displacement/share_negative`: share of responses whose summed
    log-prob fell; `displacement/share_negative_actions`: the same of actions; `.._action_0..` the two by
    action index;
    `displacement/p10|p50|p90`: quantiles over responses of the mean change per token; `displacement/wrong`:
    mean over wrong answers; `displacement/positive` and `displacement/share_negative_positive`: mean and
    share over those with advantage > 0 alone. Trajectories that were not scored again, or have no reward,
    are left out.
    """
    change = table.change
    scored = ~np.isnan(change)
    whole = np.bincount(table.row, ~scored, minlength=table.rows) == 0  # every action scored
    seen = scored & whole[table.row] & (verdict != Verdict.UNKNOWN)[table.row]
    kept = seen & (np.asarray(advantages) >= 0)[table.row]
    above = seen & (np.asarray(advantages) > 0)[table.row]
    out = {
        "displacement/positive": table.mean_per_token(change, above),
        "displacement/mean": table.mean_per_token(change, kept),
        "displacement/wrong": table.mean_per_token(change, seen & (verdict == Verdict.WRONG)[table.row]),
        "displacement/share_negative_actions": _share(change[kept] < 0),
    }
    for k in range(min(int(table.index.max(initial=-1)) + 1, MAX_ACTION_CURVES)):
        chosen = kept & (table.index == k)
        out[f"displacement/mean_action_{k}"] = table.mean_per_token(change, chosen)
        out[f"displacement/share_negative_action_{k}"] = _share(change[chosen] < 0)
    tokens = table.per_row(np.where(kept, table.tokens, 0))
    response = table.per_row(np.where(kept, change, 0.0))[tokens > 0]
    out["displacement/share_negative"] = _share(response < 0)
    rose = (np.asarray(advantages) > 0)[tokens > 0]
    out["displacement/share_negative_positive"] = _share(response[rose] < 0)
    out |= _quantiles("displacement/p", response / tokens[tokens > 0], (10, 50, 90))
    return _known(out)


def update_divergence(batch: TokenBatch, logp_old: np.ndarray, logp_new: np.ndarray) -> dict[str, float]:
    """How far the update moved the policy on the action tokens that were scored again (arrays [sum T], NaN
    elsewhere): `kl/old`, the k3 estimate of KL(old || new), which is unbiased since the old policy sampled
    them; `ratio/p1|p50|p99`, quantiles of new / old."""
    seen = (batch.action_ids >= 0) & np.isfinite(logp_new) & np.isfinite(logp_old)
    # Bounded: the estimate grows as exp does, and a single token would be all of the mean.
    d = np.clip(np.asarray(logp_new, np.float64)[seen] - np.asarray(logp_old, np.float64)[seen], -10, 10)
    if not len(d):
        return {}
    return {"kl/old": float((np.expm1(d) - d).mean()), **_quantiles("ratio/p", np.exp(d), (1, 50, 99))}


def lag_probe(batch: TokenBatch, logp_now: np.ndarray, rows: Sequence[int] | None = None) -> float | None:
    """Mean change per token, in nats, of trajectories of some steps ago (`batch.logp_old`) under the
    weights of now (`logp_now`, [sum T]).

    `rows` picks trajectories (the right ones); None takes all. The metric `probe/lag`.
    """
    if batch.logp_old is None:
        raise ValueError("lag_probe: the batch has no logp_old to compare with")
    table = ActionTable.of_tokens(batch, batch.logp_old, logp_now)
    chosen = np.ones(len(table.row), bool) if rows is None else np.isin(table.row, np.asarray(rows))
    return table.mean_per_token(table.change, chosen)


def fixed_probe(batch: TokenBatch, logp_now: np.ndarray) -> float | None:
    """Mean log-prob per token of the frozen trajectories under the weights of now: the metric
    `probe/fixed`."""
    table = ActionTable.of_tokens(batch, logp_now)
    return table.mean_per_token(table.before, np.ones(len(table.row), bool))


def leak(batch: TokenBatch, logp_old: np.ndarray, entropy: np.ndarray | float) -> float | None:
    """|mean(-logp of sampled tokens) - mean entropy| over action tokens, in nats. The metric
    `leak/logp_entropy`.

    Near 0 when sampler and learner have the same support. `entropy`: [sum T], or its mean over the action
    tokens.
    """
    inside = batch.action_ids >= 0
    if not inside.any():
        return None
    mean = float(np.asarray(entropy, np.float64)[inside].mean()) if np.ndim(entropy) else float(entropy)
    return abs(float(-np.asarray(logp_old, np.float64)[inside].mean()) - mean)


def sampler_mismatch(batch: TokenBatch, logp_old: np.ndarray) -> dict[str, float]:
    """`mismatch/abs_logp`: mean |logp_old - logp_sampler| of action tokens; `kl/sampler`: its k3 estimate of
    KL(sampler || learner)."""
    inside = batch.action_ids >= 0
    if batch.logp_sampler is None or not inside.any():
        return {}
    d = np.asarray(logp_old, np.float64)[inside] - np.asarray(batch.logp_sampler, np.float64)[inside]
    bounded = np.clip(d, -10, 10)
    return {
        "mismatch/abs_logp": float(np.abs(d).mean()),
        "kl/sampler": float((np.expm1(bounded) - bounded).mean()),
    }


def reward_metrics(groups: Sequence[str], rewards: Sequence[float | None]) -> dict[str, float]:
    """`reward/mean`, and `groups/zero_variance`: the share of groups (of two or more) without two different
    rewards.

    What has no reward says nothing: a group none of whose rewards is known is not counted, and without any
    reward both are absent.
    """
    values = known_rewards(rewards)
    by_group: dict[str, list[float]] = {}
    for group, value in zip(groups, values, strict=True):
        by_group.setdefault(group, []).append(float(value))
    known = [[x for x in v if np.isfinite(x)] for v in by_group.values() if len(v) > 1]
    flat = [len(set(v)) < 2 for v in known if v]
    finite = values[np.isfinite(values)]
    return _known(
        {
            "reward/mean": float(finite.mean()) if len(finite) else None,
            "groups/zero_variance": _share(np.asarray(flat, bool)),
        }
    )


def tool_round_metrics(table: ActionTable, tool_rounds: Sequence[int]) -> dict[str, float]:
    """`nll/rounds_0..`: mean negative log-prob per token of the trajectories with that many tool rounds."""
    rounds = np.minimum(np.asarray(tool_rounds, np.int64), MAX_ROUND_CURVES)
    out = {}
    for n in np.unique(rounds):
        mean = table.mean_per_token(-table.before, rounds[table.row] == n)
        out[f"nll/rounds_{n}"] = mean
    return _known(out)


def retrieval_metrics(
    groups: Sequence[str], verdict: np.ndarray, first_documents: Sequence[Sequence[str] | None]
) -> dict[str, float]:
    """`retrieval/wrong_same_documents`: share of wrong answers whose first retrieval gave the same documents
    as a right one's of the group.

    These are the answers that search no longer tells apart: what pushes them down pushes the right ones'
    first action down too.
    """
    right = {
        (g, tuple(sorted(d)))
        for g, v, d in zip(groups, verdict, first_documents, strict=True)
        if v == Verdict.RIGHT and d is not None
    }  # order of the documents does not matter
    wrong = [(g, d) for g, v, d in zip(groups, verdict, first_documents, strict=True) if v == Verdict.WRONG]
    return _known(
        {
            "retrieval/wrong_same_documents": _share(
                np.asarray([d is not None and (g, tuple(sorted(d))) in right for g, d in wrong], bool)
            )
        }
    )


def search_metrics(documents: Sequence[Sequence[Sequence[str] | None]]) -> dict[str, float]:
    """`retrieval/empty`: share of the searches that returned no document; `retrieval/repeated`: share of the
    searches after a trajectory's first that returned the same documents as an earlier one of it.

    documents: by trajectory and action; None for an action that did not search."""
    empty: list[bool] = []
    repeated: list[bool] = []
    for actions in documents:
        before: set[frozenset[str]] = set()
        for returned in actions:
            if returned is None:
                continue
            found = frozenset(returned)
            empty.append(not found)
            if before:
                # A second search without documents is an empty one, and repeats nothing.
                repeated.append(bool(found) and found in before)
            before.add(found)
    return _known(
        {
            "retrieval/empty": _share(np.asarray(empty, bool)),
            "retrieval/repeated": _share(np.asarray(repeated, bool)),
        }
    )


def search_errors(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`retrieval/errors`: share of the searches that were answered after at least one try had failed. An
    agent sees no error: a search that gets no answer at all fails its trajectory, which is run again."""
    failed = [a.search_failures > 0 for t in trajectories for a in t.actions if a.document_ids is not None]
    return _known({"retrieval/errors": _share(np.asarray(failed, bool))})


def unrewarded_share(
    table: ActionTable,
    groups: Sequence[str],
    rewards: Sequence[float | None],
    right: Sequence[bool | None] | None,
    preserved: np.ndarray,
) -> float | None:
    """Share of the preserved tokens (preserved: bool [B]) that come from groups without any right
    answer and without two different rewards: all their advantages are 0, which counts as not negative. The
    metric `llds/preserved_unrewarded`; None where no token is held."""
    values = known_rewards(rewards)
    good = is_right(rewards)
    if right is not None:
        good = np.asarray([g if r is None else r for g, r in zip(good, right, strict=True)], bool)
    earned: dict[str, set[float]] = {}
    taught = set()
    for group, value, is_good in zip(groups, values, good, strict=True):
        earned.setdefault(group, set()).update([float(value)] if np.isfinite(value) else [])
        if is_good:
            taught.add(group)
    idle = np.asarray([g not in taught and len(earned[g]) < 2 for g in groups], bool)
    held = np.asarray(preserved, bool)[table.row]
    tokens = int(table.tokens[held].sum())
    return float(table.tokens[held & idle[table.row]].sum() / tokens) if tokens else None


def largest_drop(
    batch: TokenBatch, logp_old: np.ndarray, logp_new: np.ndarray, preserved: np.ndarray
) -> float | None:
    """The largest drop of one preserved token over the whole update, in nats; 0 where none dropped. The
    metric `llds/largest_drop`; None where no preserved row (bool [B]) was scored again."""
    held = np.repeat(np.asarray(preserved, bool), np.diff(batch.offsets)) & (batch.action_ids >= 0)
    drops = (np.asarray(logp_old, np.float64) - np.asarray(logp_new, np.float64))[held]
    drops = drops[~np.isnan(drops)]
    return max(0.0, float(drops.max())) if len(drops) else None


def repetition(token_ids: Sequence[int], size: int = 4) -> float | None:
    """Share of the runs of `size` tokens that stood before in the same text; None for a text that is
    shorter."""
    tokens = np.asarray(token_ids, np.uint64)
    runs = len(tokens) - size + 1
    if runs < 1:
        return None
    # One 64-bit number per run, wrapping around: two different runs share one in 10^19 cases.
    key = np.zeros(runs, np.uint64)
    for i in range(size):
        key = key * np.uint64(0x9E3779B97F4A7C15) + tokens[i : i + runs] + np.uint64(1)
    return 1.0 - len(np.unique(key)) / runs


def rollout_metrics(trajectories: Sequence[Trajectory], seconds: float | None = None) -> dict[str, float]:
    """`rollout/length` (model tokens), `rollout/searches`, `rollout/valid` (share of actions), the shares of
    trajectories by how they end (`rollout/finished` with an answer, `rollout/truncated` at the limit of
    tokens, `rollout/at_turn_limit`), `text/repetition` (mean over trajectories), `rollout/tokens_per_s`."""
    repeated = [repetition([i for a in t.actions for i in a.token_ids]) for t in trajectories]
    texts = [r for r in repeated if r is not None]
    actions = [a for t in trajectories for a in t.actions]
    tokens = sum(len(a.token_ids) for a in actions)
    out = {
        "rollout/length": tokens / len(trajectories) if trajectories else None,
        "rollout/searches": float(np.mean([t.searches for t in trajectories])) if trajectories else None,
        "rollout/valid": _share(np.asarray([a.kind != "invalid" for a in actions], bool)),
        "rollout/finished": _share(np.asarray([t.finish == "answer" for t in trajectories], bool)),
        "rollout/truncated": _share(np.asarray([t.finish == "length" for t in trajectories], bool)),
        "rollout/at_turn_limit": _share(np.asarray([t.finish == "turns" for t in trajectories], bool)),
        "text/repetition": float(np.mean(texts)) if texts else None,
        "rollout/tokens_per_s": tokens / seconds if seconds else None,
    }
    return _known(out)


def record_metrics(trajectories: Sequence[TrajectoryRecord]) -> dict[str, float]:
    """The metrics that REST records alone allow: what the service adds to a step whose trainer posts no
    metrics of its own."""
    if not trajectories:
        return {}
    whole = ActionTable.of_records(trajectories)
    advantages = np.asarray([t.advantage for t in trajectories])
    groups = [t.group for t in trajectories]
    rewards = [t.reward for t in trajectories]
    verdict = verdicts(rewards, advantages, [t.right for t in trajectories])
    table = whole.only(verdict != Verdict.UNKNOWN)
    documents = [[a.documents for a in t.actions] for t in trajectories]
    first = [next((d for d in of_one if d is not None), None) for of_one in documents]
    return {
        **likelihood_metrics(table, verdict),
        **displacement_metrics(table, advantages, verdict),
        **reward_metrics(groups, rewards),
        **tool_round_metrics(table, [t.tool_rounds for t in trajectories]),
        **(retrieval_metrics(groups, verdict, first) if any(d is not None for d in first) else {}),
        **search_metrics(documents),
        "rollout/length": float(whole.tokens.sum() / len(trajectories)),
        "rollout/searches": float(np.mean([t.tool_rounds for t in trajectories])),
    }


def _share(flags: np.ndarray) -> float | None:
    return float(flags.mean()) if len(flags) else None


def _quantiles(name: str, values: np.ndarray, percent: Sequence[int]) -> dict[str, float]:
    """`NAME10` and so on; none without values."""
    if not len(values):
        return {}
    found = np.quantile(values, [p / 100 for p in percent])
    return {f"{name}{p}": float(value) for p, value in zip(percent, found, strict=True)}


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {k: v for k, v in values.items() if v is not None}
