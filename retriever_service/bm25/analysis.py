"""Text to terms, the same for passages and queries: lower case, words, stop words out, stems."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import Stemmer

from retriever_service.bm25.stop_words import stop_words
from services.common.errors import UserError
from services.common.names import accepted

_WORD = re.compile(r"\w+")
_MAY_HAVE_MARKS = re.compile("[^\x00-\u02ff\u2000-\u20cf]")
"""A character that is no Latin letter or punctuation. Most texts have none, and the pattern that looks for
marks is eight times as slow."""
_MEMO_WORDS = 2_000_000


@dataclass(frozen=True)
class AnalyzerSettings:
    """How text becomes terms. Kept in the index, so that queries are treated as the passages were."""

    language: str = "english"
    """Language of the stemmer and of the stop words (`none`: words as they are)."""
    stem: bool = True
    stop_words: bool = True

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def languages() -> list[str]:
    """The languages that are accepted."""
    return ["none", *Stemmer.algorithms()]


class Analyzer:
    """Splits text into terms. Not thread-safe (the stemmer keeps state): each owner has its own."""

    def __init__(self, settings: AnalyzerSettings) -> None:
        known = languages()
        if settings.language not in known:
            raise UserError(f"language {settings.language!r}: {accepted(settings.language, known)}")
        self.settings = settings
        plain = settings.language == "none"
        self._turkish = settings.language == "turkish"
        self._stop = stop_words(settings.language) if settings.stop_words and not plain else frozenset()
        self._stem = Stemmer.Stemmer(settings.language).stemWord if settings.stem and not plain else None

    def terms(self, text: str) -> list[str]:
        """Terms of a text, in order, with repeats."""
        return [term for term in map(self.term, self.words(text)) if term is not None]

    def words(self, text: str) -> list[str]:
        """Words of a text in lower case, in order."""
        text = self.lower(text)
        return (_WORD if text.isascii() or not _MAY_HAVE_MARKS.search(text) else _marked_word()).findall(text)

    def lower(self, text: str) -> str:
        """A text in lower case: two texts of which this is the same have the same terms."""
        if text.isascii() and not self._turkish:
            return text.lower()
        # Python lowers İ to an i and a dot of its own, which no query without the dot would match.
        text = unicodedata.normalize("NFC", text).replace("İ", "i")
        return (text.replace("I", "ı") if self._turkish else text).lower()

    def term(self, word: str) -> str | None:
        """The term of a word (in lower case); None for a stop word."""
        if word in self._stop:
            return None
        return self._stem(word) if self._stem else word


@cache
def _marked_word() -> re.Pattern[str]:
    """As `_WORD`, with the marks that belong to a letter, as the vowel signs of Hindi and Tamil do: `\\w`
    alone ends the word there."""
    marks = (chr(c) for c in range(0x300, 0x20000) if unicodedata.category(chr(c)) in ("Mn", "Mc"))
    return re.compile(rf"\w[\w{''.join(marks)}]*")


class TermIds:
    """Text to the ids of its terms, remembering words. `id_of` gives the id of a term, or None for one to be
    left out."""

    def __init__(self, analyzer: Analyzer, id_of: Callable[[str], int | None]) -> None:
        self._words = analyzer.words
        self._memo = _Memo(analyzer, id_of)

    def __call__(self, text: str) -> list[int]:
        """Ids of the terms, in order, with repeats."""
        memo = self._memo
        if len(memo) > _MEMO_WORDS:
            memo.clear()
        found = map(memo.__getitem__, self._words(text))
        return [number for number in found if number is not None]


class _Memo(dict[str, int | None]):
    """The id of each word that was seen; stemming costs far more than a look into a dictionary."""

    def __init__(self, analyzer: Analyzer, id_of: Callable[[str], int | None]) -> None:
        super().__init__()
        self._term = analyzer.term
        self._id_of = id_of

    def __missing__(self, word: str) -> int | None:
        term = self._term(word)
        number = self[word] = None if term is None else self._id_of(term)
        return number
