"""Comparing answers without losing numbers and signs: the normalisation of `em_strict`."""

from __future__ import annotations

import re
import unicodedata

_ARTICLES = ("a", "an", "the")
_SUPERSCRIPT = re.compile("[\u00b2\u00b3\u00b9\u2070\u2074-\u207b]+")
_FRACTION = re.compile("(?<=\\d)(?=[\u00bc-\u00be\u2150-\u215f])")
_FOLDED = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),  # hyphens, dashes, minus
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u02bc`\u00b4", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb", '"'),
        "\u2044": "/",  # what NFKC makes of a fraction
    }
)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NOTHING = re.compile(
    r"(?<=[^\W\d_])'(?=[^\W\d_])"  # an apostrophe in a word
    r"|(?<!\d)\.(?!\d)|(?<=\d)\.(?!\d)|(?<=[^\W\d_])\.(?=\d)"  # a point that belongs to no number
)
_SPACE = re.compile(
    r"""["'();!?\[\]{}]"""
    r"|(?<!\d)[,:]|[,:](?!\d)"
    r"|(?<=[^\W_])-+(?=[^\W\d_])|(?<=[^\W\d_])-+(?=\d)"  # a hyphen in a word
    r"|(?<!\S)-+(?!\S)"  # a dash between words
)


def normalize_strict(text: str) -> str:
    """Unicode folded, lower case, no sentence punctuation, no a/an/the unless nothing else is left, single
    spaces.

    Decimal points, signs and symbols stay: `1.5`, `-5`, `C++`, `50%`, `$5`. `2,000` is `2000`, and `10` to
    the power of 5 is not `105`.
    """
    text = _SUPERSCRIPT.sub(lambda run: f"^{run[0]}", text)
    text = _FRACTION.sub(" ", text)
    text = unicodedata.normalize("NFKC", text).translate(_FOLDED)
    text = unicodedata.normalize("NFKC", text.casefold())
    text = "".join(c for c in text if unicodedata.category(c) != "Cf")  # zero-width characters
    text = _SPACE.sub(" ", _NOTHING.sub("", _THOUSANDS.sub("", text)))
    words = text.split()
    return " ".join([w for w in words if w not in _ARTICLES] or words[-1:])
