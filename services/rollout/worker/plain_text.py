"""Encoding text from outside: questions, documents, answers of tools. None of it becomes a control token.

A tokenizer makes one control token of `<|im_end|>` wherever it stands, so a passage that holds those
characters could end the user's turn and begin the assistant's. Here such text is spelled out in ordinary
tokens, while our own markup and the chat template's keep theirs. Text without any of it is encoded as the
tokenizer alone would.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

_MARKUP = re.compile(r"<(?!0x).+>|\[.+\]", re.DOTALL)
"""Added tokens that are not `special` and act as control all the same (`<tool_call>`, `<think>`, `[INST]`),
not runs of spaces or words."""
_HARMLESS = "zqxj \U0001f642 \ua66e \U00013000 \u2d65 \U000f0000"
"""Characters that few tokenizers know. The tokens that stand for them (`<unk>`, bytes) may come from any
text, and control nothing."""


class Outside(str):
    """Text that neither we nor the chat template wrote."""

    __slots__ = ()


class TextEncoder:
    """Text to token ids, nothing added at its ends."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._control = control_tokens(tokenizer)
        longest_first = sorted(self._control.values(), key=len, reverse=True)
        names = "|".join(map(re.escape, longest_first)) or "(?!)"  # which never matches
        self._spelling = re.compile(f"(?=({names}))")
        self._control_of = lru_cache(maxsize=256)(lambda text: self._controls(self._plain(text)))

    def encode(self, *pieces: str) -> list[int]:
        """Ids of the pieces joined. Pieces of type `Outside` yield no control token, whatever stands in
        them."""
        ids = self._plain("".join(pieces))
        ours = [i for piece in pieces if not isinstance(piece, Outside) for i in self._control_of(piece)]
        if self._controls(ids) == ours:
            return ids
        ids = self._spelled_out(pieces)
        if self._controls(ids) == ours:
            return ids
        # The tokenizer's own normalisation made a control token of other characters: it is left out.
        dropped = (
            [i for i in self._plain(piece) if not (isinstance(piece, Outside) and i in self._control)]
            for piece in pieces
        )
        return [i for part in dropped for i in part]

    def normalized(self, text: str) -> str:
        """The text as the tokenizer normalises it before it looks for tokens."""
        normalizer = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "normalizer", None)
        return text if normalizer is None else normalizer.normalize_str(text)

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _controls(self, ids: list[int]) -> list[int]:
        return [i for i in ids if i in self._control]

    def _spelled_out(self, pieces: tuple[str, ...]) -> list[int]:
        """Ids of the joined pieces, encoded in parts: after the first character of each control token's name
        that outside text holds."""
        text = "".join(pieces)
        outside = bytearray()
        for piece in pieces:
            outside += (b"\1" if isinstance(piece, Outside) else b"\0") * len(piece)
        cuts = {
            found.start() + 1
            for found in self._spelling.finditer(text)
            if any(outside[found.start() : found.start() + len(found[1])])
        }
        return [i for a, b in pairwise([0, *sorted(cuts), len(text)]) for i in self._plain(text[a:b])]


def beginning(pieces: Sequence[str], size: int) -> list[str]:
    """The first `size` characters of the pieces, each of the type that it was."""
    kept = []
    for piece in pieces:
        kept.append(type(piece)(piece[:size]))
        size -= len(kept[-1])
    return kept


def put_before(tokenizer: Any) -> list[int]:
    """Ids that the tokenizer itself puts before a text: its BOS, or none."""
    text = tokenizer.encode("x", add_special_tokens=False)
    whole = tokenizer.encode("x")
    starts = (i for i in range(len(whole)) if whole[i : i + len(text)] == text)
    return whole[: next(starts, 0)]


def control_tokens(tokenizer: Any) -> dict[int, str]:
    """Names of the tokens that control a model, by id."""
    added = {
        i: token.content
        for i, token in tokenizer.added_tokens_decoder.items()
        if token.special or _MARKUP.fullmatch(token.content.strip())
    }
    special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    harmless = set(tokenizer.encode(_HARMLESS, add_special_tokens=False))
    return {i: name for i, name in (special | added).items() if i not in harmless and name}
