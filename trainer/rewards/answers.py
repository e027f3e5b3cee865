"""Finding the answer of a trajectory, and comparing it with the golden answers (Search-R1, arXiv 2503.09516, section 3.4)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

from services.contracts import Trajectory

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_VERDICTS = ("yes", "no", "noanswer")


def last_answer_match(text: str) -> re.Match[str] | None:
    """The last complete `<answer>...</answer>` in a text; group 1 is what it holds."""
    return max(_ANSWER.finditer(text), key=re.Match.start, default=None)


def final_action(trajectory: Trajectory) -> int | None:
    """Index among the actions of the last one that holds a complete answer. An answer never spans an observation."""
    actions = trajectory.actions
    return next((i for i in reversed(range(len(actions))) if last_answer_match(actions[i].text)), None)


def final_answer(trajectory: Trajectory) -> str | None:
    """The last complete answer that the model itself wrote, stripped; None where it wrote none."""
    index = final_action(trajectory)
    if index is None:
        return None
    return last_answer_match(trajectory.actions[index].text)[1].strip()


def normalize(text: str) -> str:
    """Lower case, no ASCII punctuation, no a/an/the, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(answer: str, golden: Iterable[str]) -> float:
    """1 if the normalised answer equals a normalised golden answer, else 0."""
    ours = normalize(answer)
    return float(any(ours == normalize(g) for g in golden))


def substring_match(answer: str, golden: Iterable[str]) -> float:
    """1 if the normalised answer holds a normalised golden answer, else 0. A golden answer of which nothing is left (`The`) must be equalled."""
    ours = normalize(answer)
    return float(any(g in ours if g else not ours for g in map(normalize, golden)))


def token_f1(answer: str, golden: Iterable[str]) -> float:
    """Best token F1 over the golden answers, 0 to 1. As in HotpotQA's scoring, yes, no and noanswer match only themselves."""
    ours = normalize(answer)
    return max((_f1(ours, normalize(g)) for g in golden), default=0.0)


def _f1(ours: str, golden: str) -> float:
    if ours == golden:
        return 1.0
    if ours in _VERDICTS or golden in _VERDICTS:
        return 0.0
    a, b = ours.split(), golden.split()
    common = sum((Counter(a) & Counter(b)).values())
    return 2 * common / (len(a) + len(b)) if common else 0.0
