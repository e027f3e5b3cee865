"""Corpora of up to tens of millions of passages, made with the statistics of a small real one.

    python -m benchmarks.made_corpus SOURCE OUT PASSAGES [--seed N] [--processes N]

The source's own passages come first, so that questions about them have their answers. The others are made,
not written: they say nothing. Like the source they have its lengths of passages and its frequencies of
words. A word's probability is Good and Turing's estimate (Good 1953), which leaves a share for words that
the source does not have. That share goes to made names, drawn by a power law without an end, so that the
vocabulary grows with the corpus as it does in real ones. Passages come in articles, which share a title of
two names and a few words of their own.

The same source, seed and number of passages give the same file. It is made in chunks of 10,000 passages, each
from a seed of its own, so a smaller corpus is the beginning of a larger one, and several processes make the
same bytes as one. Until it is whole it is called OUT.making; the same command goes on after the last whole
chunk. An OUT that ends in .gz is packed, each chunk for itself.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import lru_cache
from itertools import islice
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any

import numpy as np

from retriever_service.bm25.packed.blocks import compiled
from services.common.files import move, write_json
from services.common.processes.parent import when_parent_ends

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
_PAIRS = [low + high for high in _SYLLABLES for low in _SYLLABLES]
_GUIDES = 1 << 16
_PACKING = 3
"""Level of gzip: beyond, it costs more than the making."""


@compiled
def first_at_least(ends, guides, wanted, found):
    """As np.searchsorted(ends, wanted): `guides[k]` is the answer for k / len(guides), where the search for
    values up to the next begins."""
    for i in range(len(wanted)):
        value = wanted[i]
        at = guides[np.int64(value * len(guides))]
        while at < len(ends) and ends[at] < value:
            at += 1
        found[i] = at


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
        self._guides = np.searchsorted(self._ends, np.arange(_GUIDES) / _GUIDES)

    def draw(self, random: np.random.Generator, size: int) -> np.ndarray:
        """Numbers of `size` words of the source."""
        found = np.empty(size, np.int64)
        first_at_least(self._ends, self._guides, random.random(size), found)
        return np.minimum(found, len(self.words) - 1)


@lru_cache(1 << 18)
def name_of(number: int) -> str:
    """The made name of a number from 1 on: its digits as syllables, two at a time."""
    number, digits = divmod(number, len(_PAIRS))
    name = _PAIRS[digits]
    while number >= len(_SYLLABLES):
        number, digits = divmod(number, len(_PAIRS))
        name += _PAIRS[digits]
    return (name + _SYLLABLES[number] if number else name).capitalize()


def _names(numbers: np.ndarray) -> np.ndarray:
    """The made names of numbers, as objects in the same shape."""
    found = np.empty(numbers.size, object)
    found[:] = [name_of(number) for number in numbers.ravel().tolist()]
    return found.reshape(numbers.shape)


def draw_names(random: np.random.Generator, size: int) -> np.ndarray:
    """Numbers of `size` names."""
    number = COMMON_NAMES * (random.random(size) ** (-1 / (NAME_EXPONENT - 1)) - 1) + 1
    return np.minimum(number, 1 << 40).astype(np.int64)


def passages(source: Statistics, count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """(title, text) of made passages."""
    for chunk in range((count + CHUNK - 1) // CHUNK):
        made = _chunk(source, source.words, np.random.default_rng([seed, chunk]))
        yield from islice(made, min(CHUNK, count - chunk * CHUNK))


def _chunk(source: Statistics, words: np.ndarray, random: np.random.Generator) -> Iterator[tuple[str, str]]:
    """`words` are the source's, in whatever form they are wanted."""
    lengths = random.choice(source.lengths, CHUNK)
    article = np.cumsum(random.random(CHUNK) < 1 / ARTICLE_PASSAGES)
    titles = _names(draw_names(random, 2 * (CHUNK + 1)).reshape(-1, 2)[: article[-1] + 1])
    own = source.draw(random, OWN_WORDS * (CHUNK + 1)).reshape(-1, OWN_WORDS)
    total = int(lengths.sum())
    text = words[source.draw(random, total)]
    kind = random.random(total)
    new_at = np.flatnonzero(kind < source.new_share)
    text[new_at] = _names(draw_names(random, len(new_at)))
    place = random.integers(0, OWN_WORDS + 2, total)
    own_at = np.flatnonzero((kind >= source.new_share) & (kind < source.new_share + OWN_SHARE))
    group = np.repeat(article, lengths)[own_at]
    which = place[own_at]
    plain = which < OWN_WORDS
    text[own_at[plain]] = words[own[group[plain], which[plain]]]
    text[own_at[~plain]] = titles[group[~plain], which[~plain] - OWN_WORDS]
    flat = text.tolist()
    headings = [" ".join(pair) for pair in titles.tolist()]
    begin = 0
    for of, length in zip(article.tolist(), lengths.tolist(), strict=True):
        yield headings[of], " ".join(flat[begin : begin + length])
        begin += length


class _Maker:
    """Makes the pieces of a corpus: the source's own passages, then the chunks."""

    def __init__(self, source: Path, count: int, seed: int, packed: bool) -> None:
        with source.open(encoding="utf-8") as file:
            self._own = [json.loads(line)["contents"] for line in file][:count]
        self._source = Statistics(contents.partition("\n")[2].split() for contents in self._own)
        self._words = np.array([encode_basestring(word)[1:-1] for word in self._source.words], object)
        self._count = count
        self._seed = seed
        self._packed = packed
        self.pieces = 1 + (count - len(self._own) + CHUNK - 1) // CHUNK

    def end_of(self, piece: int) -> int:
        """Passages up to the end of a piece."""
        return min(self._count, len(self._own) + piece * CHUNK)

    def make(self, piece: int) -> bytes:
        """The lines of a piece, as they go into the file."""
        if piece == 0:
            contents = [encode_basestring(text) for text in self._own]
            first = 0
        else:
            made = _chunk(self._source, self._words, np.random.default_rng([self._seed, piece - 1]))
            first = self.end_of(piece - 1)
            contents = [
                f'"\\"{title}\\"\\n{text}"' for title, text in islice(made, self.end_of(piece) - first)
            ]
        lines = [f'{{"id": "{number}", "contents": {text}}}\n' for number, text in enumerate(contents, first)]
        data = "".join(lines).encode()
        return gzip.compress(data, _PACKING, mtime=0) if self._packed else data


_maker: _Maker
"""Of a process that makes pieces for another."""


def _begin(*of_maker: Any) -> None:
    global _maker
    when_parent_ends(lambda: os._exit(1))
    _maker = _Maker(*of_maker)


def _make(piece: int) -> bytes:
    return _maker.make(piece)


def _made(maker: _Maker, of_maker: tuple[Any, ...], first: int, processes: int) -> Iterator[bytes]:
    """The pieces from `first` on, in order; at most two a process are made ahead."""
    if processes == 1:
        yield from map(maker.make, range(first, maker.pieces))
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, _begin, of_maker) as pool:
        ahead: deque[Future[bytes]] = deque()
        for piece in range(first, maker.pieces):
            ahead.append(pool.submit(_make, piece))
            if len(ahead) > 2 * processes:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def write(source: Path, out: Path, count: int, seed: int = 0, processes: int = 1) -> None:
    """Write a made corpus as JSON Lines, in the form of Search-R1's corpora."""
    of_maker = (source, count, seed, out.suffix == ".gz")
    maker = _Maker(*of_maker)
    making = out.with_name(out.name + ".making")
    state_file = out.with_name(out.name + ".making.json")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    state = {"source": digest, "passages": count, "seed": seed, "pieces": 0, "bytes": 0}
    if making.exists() and state_file.exists():
        found = json.loads(state_file.read_text())
        if found | {"pieces": 0, "bytes": 0} == state:
            state = found
            print(f"going on after {maker.end_of(state['pieces'] - 1):,} passages", flush=True)
    making.touch()
    os.truncate(making, state["bytes"])
    with making.open("ab") as file:
        for data in _made(maker, of_maker, state["pieces"], processes):
            file.write(data)
            file.flush()
            state["pieces"] += 1
            state["bytes"] += len(data)
            write_json(state_file, state)
            if state["pieces"] % 100 == 1:
                print(f"{maker.end_of(state['pieces'] - 1):,} of {count:,} passages", flush=True)
    move(making, out)
    state_file.unlink()


def parser(description: str | None) -> argparse.ArgumentParser:
    """What both commands of this folder are given: a real corpus, what to make of it, and how large."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("source", type=Path)
    made.add_argument("out", type=Path)
    made.add_argument("passages", type=int)
    made.add_argument("--seed", type=int, default=0)
    return made


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--processes", type=int, default=1)
    args = given.parse_args()
    write(args.source, args.out, args.passages, args.seed, args.processes)
