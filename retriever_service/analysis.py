"""Text to terms, the same for passages and queries: lower case, words, stop words out, stems."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

import Stemmer
from bm25s import stopwords

from .errors import BadSetting

_WORD = re.compile(r"\w+")
_STOP_WORDS = {
    "english": stopwords.STOPWORDS_EN,
    "german": stopwords.STOPWORDS_GERMAN,
    "dutch": stopwords.STOPWORDS_DUTCH,
    "french": stopwords.STOPWORDS_FRENCH,
    "spanish": stopwords.STOPWORDS_SPANISH,
    "portuguese": stopwords.STOPWORDS_PORTUGUESE,
    "italian": stopwords.STOPWORDS_ITALIAN,
    "russian": stopwords.STOPWORDS_RUSSIAN,
    "swedish": stopwords.STOPWORDS_SWEDISH,
    "norwegian": stopwords.STOPWORDS_NORWEGIAN,
    "turkish": stopwords.STOPWORDS_TURKISH,
}
_MEMO_WORDS = 2_000_000


@dataclass(frozen=True)
class AnalyzerSettings:
    """How text becomes terms. Kept in the index, so that queries are treated as the passages were."""

    language: str = "english"
    """Language of the stemmer and of the stop words (`none`: words as they are)."""
    stem: bool = True
    stop_words: bool = True

    def as_dict(self) -> dict:
        return asdict(self)


class Analyzer:
    """Splits text into terms. Not thread-safe (the stemmer keeps state): each owner has its own."""

    def __init__(self, settings: AnalyzerSettings) -> None:
        known = ["none", *Stemmer.algorithms()]
        if settings.language not in known:
            raise BadSetting(f"language {settings.language!r}: accepted are {', '.join(known)}")
        self.settings = settings
        plain = settings.language == "none"
        self._stop = frozenset(_STOP_WORDS.get(settings.language, ()) if settings.stop_words and not plain else ())
        self._stem = Stemmer.Stemmer(settings.language).stemWord if settings.stem and not plain else None
        self._memo: dict[str, str | None] = {}

    def terms(self, text: str) -> list[str]:
        """Terms of a text, in order, with repeats."""
        memo, out = self._memo, []
        for word in _WORD.findall(text.lower()):
            try:
                term = memo[word]
            except KeyError:
                term = memo[word] = None if word in self._stop else self._stem(word) if self._stem else word
                if len(memo) > _MEMO_WORDS:
                    memo.clear()
            if term is not None:
                out.append(term)
        return out
