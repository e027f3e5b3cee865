"""Corpora of up to tens of millions of passages, made with the statistics of a small real one.

    python -m benchmarks.made_corpus SOURCE OUT PASSAGES [--seed N]

The source's own passages come first, so that questions about them have their answers. The others are made,
not written: they say nothing. Like the source they have its lengths of passages and its frequencies of
words. A word's probability is Good and Turing's estimate (Good 1953), which leaves a share for words that
the source does not have. That share goes to made names, drawn by a power law without an end, so that the
vocabulary grows with the corpus as it does in real ones. Passages come in articles, which share a title of
two names and a few words of their own.

The same source, seed and number of passages give the same file. It is made in chunks of 10,000 passages, each
from a seed of its own, so a smaller corpus is the beginning of a larger one.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np

CHUNK = 10_000
NAME_EXPONENT = 1.2
COMMON_NAMES = 1000
"""Name k has a probability in proportion to (k + COMMON_NAMES) ** -NAME_EXPONENT (Zipf and Mandelbrot)."""
ARTICLE_PASSAGES = 6.5
"""Mean number of passages of an article."""
OWN_WORDS = 12
OWN_SHARE = 0.1
"""The share of a passage's words that are of its article's own: OWN_WORDS and its title's."""
_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwxyz" for vowel in "aeiou"]


class Statistics:
    """What a made corpus takes from a real one."""

    def __init__(self, texts: Iterable[Sequence[str]]) -> None:
        counts: Counter[str] = Counter()
        lengths = []
        for words in texts:
            counts.update(words)
            lengths.append(len(words))
        self.lengths = np.array(lengths)
        self.words = np.array([*counts], object)
        have = np.array([*counts.values()])
        of_count = Counter(have.tolist())
        adjusted = have.astype(np.float64)
        for count in range(1, 6):  # beyond, the estimate is noise, and little different from the count
            after = (count + 1) * of_count[count + 1] / max(of_count[count], 1)
            adjusted[have == count] = min(max(after, 0.1), count)
        self.new_share = 1 - adjusted.sum() / have.sum()
        """The share of words that the source does not have."""
        self._ends = np.cumsum(adjusted / adjusted.sum())

    def draw(self, random: np.random.Generator, size: int) -> np.ndarray:
        """Numbers of `size` words of the source."""
        return np.minimum(np.searchsorted(self._ends, random.random(size)), len(self.words) - 1)


def name_of(number: int) -> str:
    """The made name of a number from 1 on."""
    syllables = []
    while number or len(syllables) < 2:
        number, digit = divmod(number, len(_SYLLABLES))
        syllables.append(_SYLLABLES[digit])
    return "".join(syllables).capitalize()


def draw_names(random: np.random.Generator, size: int) -> np.ndarray:
    """Numbers of `size` names."""
    number = COMMON_NAMES * (random.random(size) ** (-1 / (NAME_EXPONENT - 1)) - 1) + 1
    return np.minimum(number, 1 << 40).astype(np.int64)


def passages(source: Statistics, count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """(title, text) of made passages."""
    for chunk in range((count + CHUNK - 1) // CHUNK):
        made = _chunk(source, np.random.default_rng([seed, chunk]))
        yield from islice(made, min(CHUNK, count - chunk * CHUNK))


def _chunk(source: Statistics, random: np.random.Generator) -> Iterator[tuple[str, str]]:
    lengths = random.choice(source.lengths, CHUNK)
    article = np.cumsum(random.random(CHUNK) < 1 / ARTICLE_PASSAGES)
    titles = draw_names(random, 2 * (CHUNK + 1)).reshape(-1, 2)
    own = source.draw(random, OWN_WORDS * (CHUNK + 1)).reshape(-1, OWN_WORDS)
    total = int(lengths.sum())
    common = source.words[source.draw(random, total)].tolist()
    kind = random.random(total)
    of_passage = np.repeat(np.arange(CHUNK), lengths)
    new_at = np.flatnonzero(kind < source.new_share)
    for at, name in zip(new_at.tolist(), draw_names(random, len(new_at)).tolist(), strict=True):
        common[at] = name_of(name)
    place = random.integers(0, OWN_WORDS + 2, total)
    own_at = np.flatnonzero((kind >= source.new_share) & (kind < source.new_share + OWN_SHARE))
    for at in own_at.tolist():
        group = int(article[of_passage[at]])
        which = int(place[at])
        of_title = which - OWN_WORDS
        if of_title >= 0:
            common[at] = name_of(int(titles[group, of_title]))
            continue
        common[at] = source.words[own[group, which]]
    begin = 0
    for row, length in enumerate(lengths.tolist()):
        title = " ".join(name_of(int(number)) for number in titles[int(article[row])])
        yield title, " ".join(common[begin : begin + length])
        begin += length


def write(source: Path, out: Path, count: int, seed: int = 0) -> None:
    """Write a made corpus as JSON Lines, in the form of Search-R1's corpora."""
    with source.open(encoding="utf-8") as file:
        own = [json.loads(line)["contents"] for line in file][:count]
    found = Statistics(contents.partition("\n")[2].split() for contents in own)
    made = (f'"{title}"\n{text}' for title, text in passages(found, count - len(own), seed))
    with out.open("w", encoding="utf-8") as file:
        for number, contents in enumerate(chain(own, made)):
            row = {"id": str(number), "contents": contents}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            if number % 1_000_000 == 999_999:
                print(f"{number + 1:,} passages", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("passages", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.source, args.out, args.passages, args.seed)


if __name__ == "__main__":
    main()
