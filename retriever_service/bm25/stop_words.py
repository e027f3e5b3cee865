"""Stop words by language: words that say little about a text, left out of passages and queries.

An index holds none of these words, so the lists must stay as they are: a list that changes would make old
indexes miss words of queries. English is Lucene's list. Those of the other languages are read from the
package bm25s, which takes a second to import.
"""

from __future__ import annotations

import os
from collections.abc import Set

from services.common.loading.extras import needed_for

ENGLISH = frozenset(
    [
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "but",
        "by",
        "for",
        "if",
        "in",
        "into",
        "is",
        "it",
        "no",
        "not",
        "of",
        "on",
        "or",
        "such",
        "that",
        "the",
        "their",
        "then",
        "there",
        "these",
        "they",
        "this",
        "to",
        "was",
        "will",
        "with",
    ]
)
OTHERS = (
    "dutch",
    "french",
    "german",
    "italian",
    "norwegian",
    "portuguese",
    "russian",
    "spanish",
    "swedish",
    "turkish",
)


def stop_words(language: str) -> Set[str]:
    """The stop words of a language; empty for one without a list.

    Raises EnvironmentLacks for a list of bm25s where that package is not installed."""
    if language == "english":
        return ENGLISH
    if language not in OTHERS:
        return frozenset()
    # bm25s starts JAX where it is installed, and JAX takes three quarters of the first GPU at its start.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with needed_for(f"stop words of language {language!r}"):
        from bm25s import stopwords
    return frozenset(getattr(stopwords, f"STOPWORDS_{language.upper()}"))
