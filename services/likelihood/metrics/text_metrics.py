"""What the text of a step says: log-prob of the tags, words that are none, documents without a text. In plain
Python and NumPy, from tokens and texts that are there anyway."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from services.contracts import Observation, TokenBatch, Trajectory

CONTROL_TAGS = ("think", "search", "answer")
"""Names of the tags that a policy writes itself, opening and closing."""
_TAG = re.compile(r"</?[A-Za-z_]+>")
_WORD = re.compile(
    # A script that is written without spaces gives a word per character.
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]"
    r"|[^\W_\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+"
)


def control_mask(
    batch: TokenBatch, decode: Callable[[list[int]], str], tags: Sequence[str] = CONTROL_TAGS
) -> np.ndarray:
    """bool [sum T]: the action tokens that hold a character of a whole tag.

    decode: the text of some tokens. It is called once per token id of the batch, so that a tag is found
    whether it is one token or several; a tag that runs from one action into the next is none.
    """
    pattern = re.compile(rf"</?(?:{'|'.join(map(re.escape, tags))})>")
    mask = np.zeros(len(batch.token_ids), bool)
    at = np.flatnonzero(batch.action_ids >= 0)
    if not len(at):
        return mask
    ids, which = np.unique(batch.token_ids[at], return_inverse=True)
    pieces = [decode([token]) for token in ids.tolist()]
    row = np.repeat(np.arange(len(batch)), np.diff(batch.offsets))[at]
    action = batch.action_ids[at]
    begins = np.flatnonzero((np.diff(row, prepend=-1) != 0) | (np.diff(action, prepend=-1) != 0))
    for first, end in zip(begins, [*begins[1:], len(at)], strict=True):
        texts = [pieces[i] for i in which[first:end]]
        text = "".join(texts)
        if "<" not in text:
            continue
        ends = np.cumsum([len(t) for t in texts])
        for tag in pattern.finditer(text):
            inside = slice(
                first + np.searchsorted(ends, tag.start(), side="right"),
                first + np.searchsorted(ends, tag.end()) + 1,
            )
            mask[at[inside]] = True
    return mask


def control_logp(batch: TokenBatch, logp: np.ndarray, control: np.ndarray) -> float | None:
    """Mean log-prob per token, in nats, of the tag tokens (bool [sum T]) inside the action mask. The metric
    `logp/control`; None where the policy wrote no tag."""
    chosen = control & (batch.action_ids >= 0)
    return float(np.asarray(logp, np.float64)[chosen].mean()) if chosen.any() else None


def words(text: str) -> list[str]:
    """The words of a text in lower case, tags left out: runs of letters and digits that are not a number."""
    return [w for w in _WORD.findall(_TAG.sub(" ", text).lower()) if not w.isdecimal()]


def non_words(written: Iterable[str], given: Iterable[str]) -> float | None:
    """Share of the words in `written`, the policy's texts, that stand nowhere in `given`, the questions and
    documents of the same step. The metric `text/non_words`; None without any word on either side."""
    # One document is returned to many trajectories of a group: each text is split once.
    known = {word for text in set(given) for word in words(text)}
    found = [word in known for text in written for word in words(text)]
    return 1.0 - sum(found) / len(found) if known and found else None


def text_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`text/non_words` of a step. Absent where no search of the step returned a document: against the
    questions alone every name would count."""
    if not any(a.document_ids for t in trajectories for a in t.actions):
        return {}
    observed = [s.text for t in trajectories for s in t.segments if isinstance(s, Observation)]
    asked = [f"{t.question.text} {t.question.prompt or ''}" for t in trajectories]
    share = non_words([a.text for t in trajectories for a in t.actions], [*asked, *observed])
    return {} if share is None else {"text/non_words": share}


def is_blank(contents: str) -> bool:
    """Whether a document holds no text: nothing at all, or nothing besides a title. A title is what the
    corpora of Search-R1 have above the text, a line in quotes. A line without them is a passage of one line,
    which no title tells apart from a title that has lost its text."""
    held = contents.strip()
    return not held or (len(held) > 1 and held[0] == held[-1] == '"' and "\n" not in held)


def blank_documents(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`retrieval/blank`: share of the documents of the step's searches that hold no text besides a title.
    Absent where no search returned a document, or their texts were not kept."""
    blank = [is_blank(text) for t in trajectories for a in t.actions for text in a.documents or ()]
    return {"retrieval/blank": sum(blank) / len(blank)} if blank else {}
