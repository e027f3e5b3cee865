"""Similarity of the hidden states of right and wrong answers of a group, beside that of two right and of two
wrong ones.

Why it matters (arXiv 2505.18830, on which arXiv 2512.04220 builds). Let h and pi be the last layer's state
and the policy's probabilities where token y of a right answer is drawn, and h', pi', y' those of a wrong
answer with advantage A' < 0. A small step of rate eta on the wrong token moves the right one's log-prob,
through the output head, by

    eta A' <e_y - pi, e_y' - pi'> <h, h'>

- In the prefix that both share, states, probabilities and tokens are the same: every shared token of the
  wrong answer pushes the right one down, in full. (Right answers push it up: where all answers of a group
  share it, the pushes cancel, since their advantages sum to 0.) Its length says how much of an answer that
  concerns.
- After the first token that differs the states part. How alike they stay says how far the penalty of a wrong
  answer still reaches a right one.

What is measured, for each pair of a group that has right and wrong answers: the action tokens in the longest
common prefix of the two rows (prompt, actions, observations), and the mean cosine of the states from which
the next WINDOW action tokens after the first token that differs are drawn, the m-th of one row with the m-th
of the other. The states of that first token itself are still the same, and are left out.

Limits. The factor <e_y - pi, e_y' - pi'>, which has the sign, and the lengths of the states are left out.
States of language models are alike in any case: a cosine means something only beside those of the other two
kinds of pairs. Tokens are aligned by their order, whatever they say. The layers below the head are not looked
at.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.contracts import TokenBatch

WINDOW = 16
"""Action tokens after the first one that differs."""
KINDS = {(True, True): "right_right", (False, False): "wrong_wrong"}
MIXED = "right_wrong"
PAIRS = (MIXED, *KINDS.values())


@dataclass(frozen=True)
class Alike:
    """The pairs of one kind in one group. compared: those with a token after the first that differs; cosine:
    the mean over them, None without one."""

    pairs: int
    shared_tokens: float
    compared: int
    cosine: float | None


def of_group(
    batch: TokenBatch, states: Sequence[np.ndarray], right: Sequence[bool], window: int = WINDOW
) -> dict[str, Alike]:
    """By kind of pair, those kinds that the group has. batch: the group's rows; states: of each row, float
    [T, D], at position t what token t + 1 is drawn from; right: by row."""
    shared: dict[str, list[int]] = {}
    cosines: dict[str, list[float]] = {}
    for i, j in itertools.combinations(range(len(batch)), 2):
        kind = KINDS.get((right[i], right[j]), MIXED)
        apart = divergence(batch.token_ids[batch.row(i)], batch.token_ids[batch.row(j)])
        action = [np.flatnonzero(batch.action_ids[batch.row(row)] >= 0) for row in (i, j)]
        shared.setdefault(kind, []).append(int((action[0] < apart).sum()))
        after = [places[places > apart][:window] for places in action]
        count = min(map(len, after))
        if count:
            a, b = (states[row][at[:count] - 1] for row, at in zip((i, j), after, strict=True))
            cosines.setdefault(kind, []).append(float(cosine(a, b).mean()))
    return {
        kind: Alike(
            pairs=len(tokens),
            shared_tokens=float(np.mean(tokens)),
            compared=len(cosines.get(kind, ())),
            cosine=float(np.mean(cosines[kind])) if kind in cosines else None,
        )
        for kind, tokens in shared.items()
    }


def divergence(a: np.ndarray, b: np.ndarray) -> int:
    """Index of the first token in which two rows differ; the length of the shorter one where it begins the
    other."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of the rows of [N, D] and [N, D]: float64 [N]; 0 where a state is 0."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    sizes = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.divide((a * b).sum(axis=1), sizes, out=np.zeros(len(a)), where=sizes > 0)


def summary(groups: Sequence[dict[str, Alike]]) -> dict[str, Any]:
    """Means over the groups that have right and wrong answers, each group counting the same. groups: what
    `of_group` found of each; those without a mixed pair are left out, in all kinds."""
    mixed = [group for group in groups if MIXED in group]
    found: dict[str, Any] = {"window": WINDOW, "groups": len(mixed)}
    for kind in PAIRS:
        here = [group[kind] for group in mixed if kind in group]
        cosines = [one.cosine for one in here if one.cosine is not None]
        found[kind] = {
            "groups": len(here),
            "pairs": sum(one.pairs for one in here),
            "shared_tokens": float(np.mean([one.shared_tokens for one in here])) if here else None,
            "compared": sum(one.compared for one in here),
            "cosine": float(np.mean(cosines)) if cosines else None,
        }
    return found
