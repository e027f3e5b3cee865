"""One file per trainer: its updates posted, and LLDS in its loss (docs/any_trainer.md). This file: what they
share.

An adapter hooks into what its trainer publishes, where there is such a thing, and otherwise into methods by
their names, which belong to the version that its first line says.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any


def wrap(holder: Any, name: str, after: Callable[..., Any]) -> None:
    """Have `after(result, *args, **kwargs)` called with what the method returns; what it returns counts.
    Raises AttributeError where there is no such method: another version."""
    plain = getattr(holder, name)

    @functools.wraps(plain)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return after(plain(*args, **kwargs), *args, **kwargs)

    setattr(holder, name, wrapped)


def last_of(holder: Any, name: str) -> Callable[[], Any]:
    """A function that gives what the method returned last."""
    kept: list[Any] = [None]

    def keep(result: Any, *args: Any, **kwargs: Any) -> Any:
        kept[0] = result
        return result

    wrap(holder, name, keep)
    return lambda: kept[0]


def groups_of(prompt_ids: Any, prompt_mask: Any) -> list[str]:
    """A name per row [B] that rows of the same prompt share, in every process and whatever the padding.

    prompt_ids, prompt_mask: tensors [B, P]; the mask is true on the prompt's own tokens.
    """
    rows = zip(prompt_ids, prompt_mask, strict=True)
    return [str(hash(tuple(ids[kept.bool()].tolist()))) for ids, kept in rows]


def stable_name(text: str) -> str:
    """A short name for a text, the same in every process."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def padded(rows: list[Any]) -> Any:
    """A tensor [B, T] of B tensors, with 0 after the shorter ones."""
    from torch.nn.utils.rnn import pad_sequence

    return pad_sequence(rows, batch_first=True)
