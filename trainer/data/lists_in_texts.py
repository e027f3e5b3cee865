"""Several answers in the text of one cell: a list that was written as text, or parts with a mark between
them."""

from __future__ import annotations

import ast
import io
import tokenize

from services.common.records.files import json_value

_LONGEST_NAME = 60
"""Characters of an answer beyond which marks in it are those of a sentence."""


def several_in(answer: str) -> list[str]:
    """What an answer consists of, if a table's cell may hold several with a mark of its own between them:
    `Anna; Bob`, `Anna|Bob`, one a line. Commas divide too many answers that are one."""
    marked = next((mark for mark in ("\n", "|", ";") if mark in answer.strip()), None)
    parts = [part.strip() for part in answer.split(marked)] if marked else [answer]
    parts = [part for part in parts if part]
    return parts if all(len(part) <= _LONGEST_NAME for part in parts) else [answer]


def list_in(text: str) -> list[str | int | float] | None:
    """The texts and numbers of a list that was written as text, by JSON, Python or NumPy; None where it is no
    such list.

    NumPy writes no commas (`['Rome' 'Roma']`), which Python would read as one text: so it is read word by
    word.
    """
    held = json_value(text)
    if isinstance(held, list) and all(
        isinstance(one, str | int | float) and not isinstance(one, bool) for one in held
    ):
        return held
    items: list[str | int | float] = []
    quoted = False
    try:
        for token in tokenize.generate_tokens(io.StringIO(text.replace("\n", " ")).readline):
            if token.type in (tokenize.STRING, tokenize.NUMBER):
                items.append(ast.literal_eval(token.string))
                quoted |= token.type == tokenize.STRING
            elif token.string not in "[](),":  # the end is an empty text
                return None
    except (tokenize.TokenError, SyntaxError, ValueError):
        return None
    is_text = [isinstance(one, str | int | float) for one in items]
    return items if items and all(is_text) and (quoted or text[0] == "[") else None
