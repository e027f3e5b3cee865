"""The tokens of a trajectory's answer, for the answer weight of LLDS-MA (arXiv 2512.04220)."""

from __future__ import annotations

from typing import Any

import numpy as np

from services.contracts import Action, Trajectory
from services.rollout.worker.tags import Pair
from trainer.rewards.answers import final_action


def answer_mask(trajectory: Trajectory, tokenizer: Any) -> np.ndarray:
    """bool [T] over the whole sequence: tokens of the last complete `<answer>...</answer>`, tags included;
    all False where there is none.

    A token that holds a character of the span belongs to it. Positions come from decoding growing prefixes of
    the action's own tokens; nothing is encoded.
    """
    marks = [np.zeros(len(trajectory.prompt_ids), bool)]
    found = final_action(trajectory)
    index = 0
    for segment in trajectory.segments:
        mark = np.zeros(len(segment.token_ids), bool)
        if isinstance(segment, Action):
            if found and index == found[0]:
                first, end = _span(segment.token_ids, found[1], tokenizer)
                mark[first:end] = True
            index += 1
        marks.append(mark)
    return np.concatenate(marks)


def _span(token_ids: list[int], answer: Pair, tokenizer: Any) -> tuple[int, int]:
    """Tokens `[first, end)` that hold the characters of the answer."""

    def decode(n: int) -> str:
        text = tokenizer.decode(token_ids[:n], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text.rstrip("\ufffd")  # a character whose bytes are not all there yet

    def tokens_to_reach(length: int) -> int:
        """Fewest tokens whose text has that many characters (bisection: the text only grows)."""
        low, high = 0, len(token_ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(decode(middle)) >= length else (middle + 1, high)
        return low

    return tokens_to_reach(answer.start + 1) - 1, tokens_to_reach(answer.end)
