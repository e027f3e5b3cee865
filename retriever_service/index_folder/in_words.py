"""The description of an index in words, for `unspiral index info`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from retriever_service.index_folder.description import IndexInfo
from services.common.counting import counted

_DIGITS = 12
"""Of a checksum, as evaluations show it."""


def in_words(info: IndexInfo) -> Iterator[str]:
    """A line for each thing that one may want to know of an index, less its name and size."""
    corpus = f"{info.corpus}, {info.corpus_bytes / 2**20:,.1f} MiB" if info.corpus_bytes else info.corpus
    yield f"corpus:    {corpus}" + (f", sha256 {info.corpus_sha256[:_DIGITS]}" if info.corpus_sha256 else "")
    yield f"settings:  {', '.join(_settings(info.settings)) or 'none'}"
    if info.segments:
        yield f"additions: {len(info.segments):,}, which `unspiral index merge` makes one with the rest"
    if info.deletions:
        hidden = int(info.deletions.split(".")[1])  # deletions.N.json
        yield f"deletions: {counted(hidden, 'passage')}, which `unspiral index merge` takes out"
    if info.skipped:
        left = counted(info.skipped, "line", "lines")
        yield f"left out:  {left} of the corpus, the first:"
        yield from (f"  {reason}" for reason in info.skipped_reasons)
    yield f"files:     {len(info.files):,}, all whole"


def _settings(settings: Any) -> Iterator[str]:
    """`name value` of each that is set; those of a part by their own names."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _settings(value)
        elif value is not None and name != "fingerprint":
            yield f"{name} {_shown(value)}"


def _shown(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
