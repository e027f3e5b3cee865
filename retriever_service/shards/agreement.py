"""Whether the indexes of shards go together: their scores must be of one scale, and their ids differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retriever_service.errors import IndexInvalid
from retriever_service.shards.wire import About, Numbers

_BM25 = ("analyzer", "k1", "b")
_DENSE = ("family", "max_tokens", "fingerprint")
_MENDED = (
    "Rows without ids are numbered from 0 on in each corpus: `unspiral data passages` writes a corpus with "
    "ids, under its file's name; where rows have ids, give them others, different in each shard"
)


def agreed(shards: Sequence[tuple[str, About]]) -> dict[str, Any]:
    """The settings that all shards share, with `backend`. Shards are (name, index).

    Raises IndexInvalid, naming two shards, where they differ.
    """
    (first, one), *others = shards
    if not others:
        return {**one.settings, "backend": one.backend}
    if one.backend not in ("bm25", "dense"):
        raise IndexInvalid(
            f"shard {first}: its index is {one.backend}; bm25 and dense ones are merged, or one shard alone"
        )
    seen: dict[str, str] = {}
    for name, about in shards:
        if about.backend != one.backend:
            raise IndexInvalid(f"shard {name}: its index is {about.backend}, that of {first} {one.backend}")
        if about.backend == "bm25" and about.tokens is None:
            raise IndexInvalid(
                f"shard {name}: its BM25 scores are of its own passages alone; build its index with "
                "--postings packed"
            )
        for key in _BM25 if one.backend == "bm25" else _DENSE:
            have = about.settings.get(key)
            want = one.settings.get(key)
            if have != want and not (key == "fingerprint" and None in (have, want)):
                raise IndexInvalid(f"shard {name}: its index has {key} {have}, that of {first} {want}")
        if about.version in seen:
            raise IndexInvalid(
                f"shard {name}: holds the same index as {seen[about.version]}, so each passage would come "
                "twice; replicas of one shard are given as URL|URL"
            )
        seen[about.version] = name
    _refuse_shared_numbers(shards)
    return {**one.settings, "backend": one.backend}


def _refuse_shared_numbers(shards: Sequence[tuple[str, About]]) -> None:
    """Raise IndexInvalid where two shards must have ids in common: more numbers than there are from the first
    to the last."""
    numbered = [(name, about.numbers) for name, about in shards if about.numbers is not None]
    for at, (name, own) in enumerate(numbered):
        for other, theirs in numbered[:at]:
            if own.count + theirs.count > max(own.last, theirs.last) - min(own.first, theirs.first) + 1:
                raise IndexInvalid(
                    f"shard {name}: its passages have ids {_span(own)}, those of {other} {_span(theirs)}: "
                    f"different passages share an id. {_MENDED}"
                )


def _span(numbers: Numbers) -> str:
    return f"{numbers.first} to {numbers.last}"
