"""The files of packed postings in `bm25/` of an index folder, memory-mapped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retriever_service.bm25.packed.impacts import LEVELS, windows_of
from retriever_service.bm25.search import FOLDER
from retriever_service.errors import IndexInvalid, damaged

WORDS_FILE = "postings.words"
"""uint32: the bits of all blocks, and one word more, since a value may be read with the word behind it."""
FIRSTS_FILE = "blocks.first"
"""uint32 [blocks]: the first row of each block."""
PLACES_FILE = "blocks.place"
"""uint32 [blocks]: the word where it begins."""
WIDTHS_FILE = "blocks.widths"
"""uint16 [blocks]: bits of a distance of rows (low byte) and of a term frequency (high byte)."""
MAXIMA_FILE = "blocks.maximum"
"""float32 [blocks]: the highest tf / (tf + norm) of its postings."""
FIRST_BLOCK_FILE = "terms.block"
"""uint32 [terms]: the first block of each term."""
FREQUENCIES_FILE = "terms.frequency"
"""uint32 [terms]: rows that have the term."""
TEXT_FILE = "terms.text"
"""The terms in UTF-8, one a line, in the order of their first sight..."""
OFFSETS_FILE = "terms.offsets"
"""... where each line begins, and the end, uint64 [terms + 1]..."""
ORDER_FILE = "terms.order"
"""... and the numbers of the terms in the order of their bytes, uint32 [terms]."""
LENGTHS_FILE = "rows.length"
"""uint32 [rows]: terms of each passage, with repeats."""
IMPACT_TERMS_FILE = "impacts.terms"
"""uint32 [frequent terms]: those with impacts (`retriever_service.bm25.packed.impacts`), ascending..."""
IMPACT_POSTINGS_FILE = "impacts.postings"
"""... their postings once more, uint16, one term behind another..."""
IMPACT_LEVELS_FILE = "impacts.levels"
"""... the bounds of the levels, float32 [frequent terms, LEVELS]..."""
IMPACT_WINDOWS_FILE = "impacts.windows"
"""... where each window begins among the term's postings, uint32 [frequent terms, windows + 1]..."""
IMPACT_TOPS_FILE = "impacts.tops"
"""... and its highest level, uint8 [frequent terms, windows]."""
MEAN_FILE = "mean.length"
"""float64: the mean of the lengths, by which the maxima were computed."""


@dataclass(frozen=True)
class ImpactFiles:
    """The impacts of one segment's frequent terms."""

    terms: np.ndarray
    begins: np.ndarray
    """Of each term's postings, and the end of the last one's."""
    postings: np.ndarray
    levels: np.ndarray
    windows: np.ndarray
    tops: np.ndarray


@dataclass(frozen=True)
class PackedFiles:
    """One segment's postings, as the kernel takes them."""

    words: np.ndarray
    firsts: np.ndarray
    places: np.ndarray
    widths: np.ndarray
    maxima: np.ndarray
    first_block: np.ndarray
    frequencies: np.ndarray
    text: np.ndarray
    offsets: np.ndarray
    order: np.ndarray
    lengths: np.ndarray
    mean: float
    impacts: ImpactFiles | None
    """None in an index that was built before there were any."""

    @property
    def blocks(self) -> tuple[np.ndarray, ...]:
        """The arrays of the posting lists."""
        return (self.words, self.firsts, self.places, self.widths, self.maxima, self.first_block,
                self.frequencies)  # fmt: skip


def open_packed(index: Path) -> PackedFiles:
    """Map the packed postings of an index folder. Raises IndexInvalid."""
    folder = index / FOLDER
    with damaged(f"{folder}: not a readable BM25 index"):
        lengths = mapped(folder / LENGTHS_FILE, np.uint32)
        frequencies = mapped(folder / FREQUENCIES_FILE, np.uint32)
        found = PackedFiles(
            words=mapped(folder / WORDS_FILE, np.uint32),
            firsts=mapped(folder / FIRSTS_FILE, np.uint32),
            places=mapped(folder / PLACES_FILE, np.uint32),
            widths=mapped(folder / WIDTHS_FILE, np.uint16),
            maxima=mapped(folder / MAXIMA_FILE, np.float32),
            first_block=mapped(folder / FIRST_BLOCK_FILE, np.uint32),
            frequencies=frequencies,
            text=mapped(folder / TEXT_FILE, np.uint8),
            offsets=mapped(folder / OFFSETS_FILE, np.uint64),
            order=mapped(folder / ORDER_FILE, np.uint32),
            lengths=lengths,
            mean=float(np.fromfile(folder / MEAN_FILE, np.float64)[0]),
            impacts=_impacts(folder, len(lengths), frequencies),
        )
    blocks = len(found.firsts)
    terms = len(found.frequencies)
    same = (
        blocks == len(found.places) == len(found.widths) == len(found.maxima)
        and terms == len(found.first_block) == len(found.order) == len(found.offsets) - 1
        and len(found.lengths) > 0
    )
    if not same:
        raise IndexInvalid(f"{folder}: its files are not of one index; build it again")
    return found


def _impacts(folder: Path, rows: int, frequencies: np.ndarray) -> ImpactFiles | None:
    """Raises ValueError for files of different indexes."""
    if not (folder / IMPACT_TERMS_FILE).exists():
        return None
    terms = mapped(folder / IMPACT_TERMS_FILE, np.uint32)
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(frequencies[terms], dtype=np.int64)])
    windows = windows_of(rows)
    found = ImpactFiles(
        terms=terms,
        begins=begins,
        postings=mapped(folder / IMPACT_POSTINGS_FILE, np.uint16),
        levels=mapped(folder / IMPACT_LEVELS_FILE, np.float32).reshape(len(terms), LEVELS),
        windows=mapped(folder / IMPACT_WINDOWS_FILE, np.uint32).reshape(len(terms), windows + 1),
        tops=mapped(folder / IMPACT_TOPS_FILE, np.uint8).reshape(len(terms), windows),
    )
    if len(found.postings) != begins[-1]:
        raise ValueError(f"{IMPACT_POSTINGS_FILE} has {len(found.postings)} postings instead of {begins[-1]}")
    return found


def mapped(path: Path, dtype: type) -> np.ndarray:
    """A file as a read-only array, memory-mapped. It is a plain array: the kernel would be compiled once more
    for numpy's memmap."""
    if path.stat().st_size:
        return np.asarray(np.memmap(path, dtype, "r"))
    empty: np.ndarray = np.zeros(0, dtype)
    empty.setflags(write=False)
    return empty
