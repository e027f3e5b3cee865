"""Demonstrations for supervised steps: whole trajectories as pieces of text, some of them to be learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from services.common.errors import UserError
from services.common.users_files import reading
from services.contracts import TokenBatch
from trainer.data.models import resolve_file

Piece = tuple[str, bool]
"""A text, and whether it is learnt (the model's own words) or only read (prompt, documents)."""
FORM = 'expected JSON lines such as {"pieces": [["who?", false], ["<answer> x </answer>", true]]}'


def read_demonstrations(file: str) -> list[list[Piece]]:
    """The demonstrations of a file of JSON lines. file: a path, or a name such as
    `lab:train_demonstrations:0`.

    Raises UserError for the first row that is malformed, and for a file without rows."""
    key = f"algorithm.supervised.data: {file}"
    with reading(key, "UTF-8 text"):
        lines = Path(resolve_file(file)).read_text(encoding="utf-8").splitlines()
    rows = [_pieces(line, f"{key}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UserError(f"{key}: no demonstrations; {FORM}")
    return rows


def _pieces(line: str, where: str) -> list[Piece]:
    try:
        pieces = json.loads(line)["pieces"]
        found = [(text, learnt) for text, learnt in pieces]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{where}: {FORM}") from error
    if not all(isinstance(text, str) and isinstance(learnt, bool) for text, learnt in found):
        raise UserError(f"{where}: {FORM}")
    if not found or found[0][1] or not any(learnt for _, learnt in found):
        raise UserError(f"{where}: the first piece is the prompt, which is not learnt; a later one must be")
    return found


def demonstration_batch(rows: list[list[Piece]], tokenizer: Any, *, longest: int) -> TokenBatch:
    """Demonstrations as token arrays: a learnt piece is an action. Texts are encoded piece by piece, as a
    rollout appends them, and without the tokenizer's own prefix.

    Raises UserError for one without a token to learn, or with more than `longest` tokens."""
    tokens, actions = [], []
    for i, pieces in enumerate(rows, 1):
        ids: list[int] = []
        of_action: list[int] = []
        action = 0
        for text, learnt in pieces:
            piece = tokenizer.encode(text, add_special_tokens=False)
            ids += piece
            of_action += [action if learnt else -1] * len(piece)
            action += learnt and bool(piece)
        if len(ids) > longest or not action or of_action[0] >= 0:
            raise UserError(
                f"algorithm.supervised.data: demonstration {i} has {len(ids)} tokens, "
                f"{sum(a >= 0 for a in of_action)} of them to learn; accepted: a prompt, a token to learn, "
                f"and at most rollout.max_model_tokens={longest} tokens"
            )
        tokens.append(np.asarray(ids, np.int32))
        actions.append(np.asarray(of_action, np.int16))
    return TokenBatch(
        [f"demonstration-{i}" for i in range(len(rows))],
        np.cumsum([0, *map(len, tokens)]),
        np.concatenate(tokens),
        np.concatenate(actions),
    )
