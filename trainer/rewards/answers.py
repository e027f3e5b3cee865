"""Finding the answer of a trajectory, and comparing it with the golden answers (Search-R1, arXiv 2503.09516,
section 3.4)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

from services.contracts import Trajectory
from services.rollout.worker.tags import Pair, Reading, last_answer
from trainer.rewards.strict import normalize_strict

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_VERDICTS = ("yes", "no", "noanswer")


def final_action(trajectory: Trajectory, reading: Reading | None = None) -> tuple[int, Pair] | None:
    """Which action holds the last complete answer, and where in its text. An answer never spans an
    observation.

    `reading` None: as the trajectory's own loop read its tags. An action that the loop took for a call or for
    none then holds no answer, whatever its text.
    """
    for index, action in reversed(list(enumerate(trajectory.actions))):
        if reading is None and action.kind != "answer":
            continue
        answer = last_answer(action.text, reading or trajectory.reading, action.thinking)
        if answer is not None:
            return index, answer
    return None


def final_answer(trajectory: Trajectory, reading: Reading | None = None) -> str | None:
    """The last complete answer that the model itself wrote, stripped; None where it wrote none."""
    found = final_action(trajectory, reading)
    return found[1].content.strip() if found else None


def normalize(text: str) -> str:
    """Lower case, no ASCII punctuation, no a/an/the, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def unscorable(golden: str) -> bool:
    """Whether normalisation leaves nothing of a golden answer (`A`, `+`, `The`). It is then right only as it
    is written, but for case and spacing."""
    return not normalize(golden)


def same_as_written(answer: str, golden: str) -> bool:
    """Whether two texts differ in case and spacing alone; a blank one is the same as none."""
    ours, theirs = (" ".join(text.lower().split()) for text in (answer, golden))
    return ours == theirs != ""


def equal(answer: str, golden: str) -> bool:
    """Whether both are the same once normalised. Of an answer that normalises to nothing only the words as
    written count."""
    theirs = normalize(golden)
    return normalize(answer) == theirs if theirs else same_as_written(answer, golden)


def exact_match(answer: str, golden: Iterable[str]) -> float:
    """1 if the answer equals a golden answer, else 0."""
    return float(any(equal(answer, g) for g in golden))


def strict_match(answer: str, golden: Iterable[str]) -> float:
    """1 if the answer equals a golden answer with numbers, signs and symbols kept and Unicode folded, else
    0."""
    ours = normalize_strict(answer)
    return float(any(ours == normalize_strict(g) if ours else same_as_written(answer, g) for g in golden))


def search_r1_match(answer: str, golden: Iterable[str]) -> float:
    """Search-R1's own exact match: two texts of which normalisation leaves nothing are equal."""
    ours = normalize(answer)
    return float(any(ours == normalize(g) for g in golden))


def substring_match(answer: str, golden: Iterable[str]) -> float:
    """1 if the normalised answer holds a normalised golden answer, else 0. One of which nothing is left
    (`The`) must be equalled."""
    ours = normalize(answer)
    return float(any(equal(answer, g) if unscorable(g) else normalize(g) in ours for g in golden))


def token_f1(answer: str, golden: Iterable[str]) -> float:
    """Best token F1 over the golden answers, 0 to 1. As in HotpotQA's scoring, yes, no and noanswer match
    only themselves."""
    return max((_f1(answer, g) for g in golden), default=0.0)


def _f1(answer: str, golden: str) -> float:
    if equal(answer, golden):
        return 1.0
    ours, theirs = normalize(answer), normalize(golden)
    if ours in _VERDICTS or theirs in _VERDICTS:
        return 0.0
    a, b = ours.split(), theirs.split()
    common = sum((Counter(a) & Counter(b)).values())
    return 2 * common / (len(a) + len(b)) if common else 0.0
