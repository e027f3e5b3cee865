"""Merging sorted runs of postings into packed ones, in bounded memory. Can be killed and gone on with.

A run holds the postings of some passages, term by term, rows ascending; the runs lie one behind another in
`RUN_FILES`. The terms are taken in spans of at most SPAN_POSTINGS postings: those of a span are read from
all runs, in the order of the runs, packed, and appended. After each span the files are synced and
MERGE_FILE is replaced, which holds their lengths; going on cuts the files back to those lengths. Other
sorted postings than runs are merged in the same way.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import orjson

from retriever_service.bm25.kernel import compiled
from retriever_service.bm25.packed import files as names
from retriever_service.bm25.packed.blocks import BLOCK, pack_lists
from retriever_service.bm25.packed.files import mapped
from retriever_service.bm25.packed.impacts import LEVELS, least_frequency, pack_impacts, windows_of
from retriever_service.bm25.search import FOLDER
from services.common.errors import UserError
from services.common.files import hints, write_atomically

RUN_TERMS = "run.terms"
"""uint32: the terms of each run, ascending..."""
RUN_COUNTS = "run.counts"
"""... how many postings each has in the run, uint32..."""
RUN_ROWS = "run.rows"
"""... the rows of these, uint16 from the run's first row on, or uint32..."""
RUN_TFS = "run.tfs"
"""... and their term frequencies, uint16."""
RUN_SIZES = "run.sizes"
"""uint64 [runs, 2]: terms and postings of each run."""
RUN_FIRSTS = "run.firsts"
"""The first row of each run, uint32, from which its rows count; empty where they count from 0."""
RUN_LENGTHS = "run.lengths"
"""uint32 [rows]: terms of each passage, with repeats."""
RUN_VOCABULARY = "run.vocabulary"
"""The terms in UTF-8, one a line, by their numbers."""
RUN_FILES = (
    RUN_TERMS, RUN_COUNTS, RUN_ROWS, RUN_TFS, RUN_SIZES, RUN_FIRSTS, RUN_LENGTHS, RUN_VOCABULARY,
)  # fmt: skip
MERGE_FILE = "merge.json"
SPAN_POSTINGS = 1 << 25
"""Postings in memory at a time, 12 bytes each. A term alone may have more."""
_COUNTED = 1 << 22
_PACKED_FILES = (
    names.WORDS_FILE, names.FIRSTS_FILE, names.PLACES_FILE, names.WIDTHS_FILE, names.MAXIMA_FILE,
    names.FREQUENCIES_FILE, names.IMPACT_TERMS_FILE, names.IMPACT_POSTINGS_FILE, names.IMPACT_LEVELS_FILE,
    names.IMPACT_WINDOWS_FILE, names.IMPACT_TOPS_FILE,
)  # fmt: skip


@dataclass
class _Merged:
    """How far a merge has come. `sizes` are the bytes of each file that are whole."""

    terms: int = 0
    words: int = 0
    sizes: dict[str, int] = field(default_factory=dict)


@compiled
def gather(terms, counts, rows, tfs, first_row, last, cursor, out_rows, out_tfs):
    """Copy the postings of one run's terms below `last` to where `cursor` [terms of the span] says.
    `cursor[t]` belongs to term `last - len(cursor) + t`. Returns how far it came in terms and postings."""
    term = 0
    posting = 0
    first = last - len(cursor)
    while term < len(terms) and terms[term] < last:
        own = np.int64(terms[term]) - first
        count = np.int64(counts[term])
        to = cursor[own]
        for i in range(count):
            out_rows[to + i] = first_row + rows[posting + i]
            out_tfs[to + i] = tfs[posting + i]
        cursor[own] = to + count
        posting += count
        term += 1
    return term, posting


class Postings(Protocol):
    """Postings that are read term by term, in the order of the terms."""

    frequencies: np.ndarray
    """Postings of each term, int64 [terms]."""

    def seek(self, term: int) -> None:
        """Pass over the terms below `term`."""

    def read(self, last: int, cursor: np.ndarray, rows: np.ndarray, tfs: np.ndarray) -> None:
        """Copy the postings of the terms below `last` that are not read yet, as `gather` does."""


def write_packed(
    work: Path, *, k1: float, b: float, progress: Callable[[int, int], None], postings: Postings | None = None
) -> None:
    """Write `work/bm25/` from RUN_LENGTHS, RUN_VOCABULARY and the postings, by default those of the runs in
    `work`. Raises UserError where the postings outgrow the format."""
    folder = work / FOLDER
    folder.mkdir(exist_ok=True)
    runs = postings or _Runs(work)
    lengths = mapped(work / RUN_LENGTHS, np.uint32)
    mean = max(int(lengths.sum(dtype=np.int64)) / len(lengths), 1e-9)
    norm = k1 * (1 - b + b * np.arange(int(lengths.max()) + 1, dtype=np.uint32) / mean)
    done = _resume(work)
    n_terms = len(runs.frequencies)
    starts = np.concatenate([[0], np.cumsum(runs.frequencies)])
    runs.seek(done.terms)
    files: dict[str, BinaryIO] = {}
    try:
        for name in _PACKED_FILES:
            path = folder / name
            path.touch()
            # What a killed build wrote after its last commit is of a span that is packed again.
            os.truncate(path, done.sizes.get(name, 0))
            files[name] = path.open("ab")
        while done.terms < n_terms:
            # As many whole terms as fit into a span; one at least, however long its list.
            last = int(np.searchsorted(starts, starts[done.terms] + SPAN_POSTINGS, "right")) - 1
            last = min(max(last, done.terms + 1), n_terms)
            _pack_span(runs, starts[done.terms : last + 1], last, lengths, norm, done, files)
            done.terms = last
            _commit(work, files, done)
            progress(int(starts[last]), int(starts[-1]))
        # `unpack_block` reads the word after a value too, also after the last one.
        files[names.WORDS_FILE].write(bytes(4))
    finally:
        for file in files.values():
            file.close()
    _write_terms(work, folder, runs.frequencies)
    np.array([mean], np.float64).tofile(folder / names.MEAN_FILE)
    shutil.copyfile(work / RUN_LENGTHS, folder / names.LENGTHS_FILE)


class _Runs:
    """The runs of a build, mapped, each with the place up to which it is read."""

    def __init__(self, work: Path) -> None:
        self.terms = mapped(work / RUN_TERMS, np.uint32)
        self.counts = mapped(work / RUN_COUNTS, np.uint32)
        self.tfs = mapped(work / RUN_TFS, np.uint16)
        short = (work / RUN_ROWS).stat().st_size == self.tfs.nbytes
        self.rows = mapped(work / RUN_ROWS, np.uint16 if short else np.uint32)
        sizes = np.fromfile(work / RUN_SIZES, np.uint64).reshape(-1, 2).astype(np.int64)
        self._begins = np.concatenate([np.zeros((1, 2), np.int64), np.cumsum(sizes, 0)])
        # A merge that an earlier version began has no such file.
        counted = (work / RUN_FIRSTS).exists()
        firsts = np.fromfile(work / RUN_FIRSTS, np.uint32) if counted else np.zeros(0, np.uint32)
        self._firsts = firsts if len(firsts) else np.zeros(len(sizes), np.uint32)
        vocabulary = mapped(work / RUN_VOCABULARY, np.uint8)
        self.frequencies = np.zeros(int(np.count_nonzero(vocabulary == ord("\n"))), np.int64)
        for begin in range(0, len(self.terms), _COUNTED):
            part = slice(begin, begin + _COUNTED)
            self.frequencies += np.bincount(
                self.terms[part], self.counts[part], len(self.frequencies)
            ).astype(np.int64)
        self._at = self._begins[:-1].copy()

    def seek(self, term: int) -> None:
        """As Postings."""
        for run, (begin, posting) in enumerate(self._begins[:-1].tolist()):
            end = int(self._begins[run + 1, 0])
            place = begin + int(np.searchsorted(self.terms[begin:end], term))
            self._at[run] = place, posting + int(self.counts[begin:place].sum(dtype=np.int64))

    def read(self, last: int, cursor: np.ndarray, rows: np.ndarray, tfs: np.ndarray) -> None:
        """As Postings."""
        for run in range(len(self._at)):
            term, posting = self._at[run].tolist()
            end, posting_end = self._begins[run + 1].tolist()
            terms, postings = gather(
                self.terms[term:end], self.counts[term:end], self.rows[posting:posting_end],
                self.tfs[posting:posting_end], int(self._firsts[run]), last, cursor, rows, tfs,
            )  # fmt: skip
            self._at[run] = term + terms, posting + postings


def _pack_span(
    runs: Postings, starts: np.ndarray, last: int, lengths: np.ndarray, norm: np.ndarray, done: _Merged,
    files: dict[str, BinaryIO],
) -> None:  # fmt: skip
    starts = starts - starts[0]
    count = int(starts[-1])
    rows = np.empty(count, np.int32)
    tfs = np.empty(count, np.uint16)
    runs.read(last, starts[:-1].copy(), rows, tfs)
    n_terms = len(starts) - 1
    blocks = int(((np.diff(starts) + BLOCK - 1) // BLOCK).sum())
    # At most 32 bits a distance and 16 a frequency, and each of a block's two parts rounded up to a word.
    words = np.empty(count + count // 2 + 2 * blocks + 2, np.uint32)
    firsts = np.empty(blocks, np.uint32)
    places = np.empty(blocks, np.uint32)
    widths = np.empty(blocks, np.uint16)
    maxima = np.empty(blocks, np.float32)
    frequencies = np.empty(n_terms, np.uint32)
    used, _ = pack_lists(
        rows, tfs, starts, lengths, norm, words, done.words, firsts, places, widths, maxima, frequencies
    )
    done.words += int(used)
    if done.words >= 1 << 32:
        raise UserError(
            "the postings take more than 16 GiB packed, which one index does not hold: split the corpus"
        )
    impacts = _impacts_of(rows, tfs, starts, done.terms, lengths, norm)
    parts: tuple[np.ndarray, ...] = (words[:used], firsts, places, widths, maxima, frequencies, *impacts)
    for name, part in zip(_PACKED_FILES, parts, strict=True):
        files[name].write(part.data)


def _impacts_of(
    rows: np.ndarray,
    tfs: np.ndarray,
    starts: np.ndarray,
    first_term: int,
    lengths: np.ndarray,
    norm: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """The frequent terms of a span, and what `pack_impacts` makes of their postings."""
    frequencies = np.diff(starts)
    chosen = np.flatnonzero(frequencies >= least_frequency(len(lengths)))
    windows = windows_of(len(lengths))
    postings = np.empty(int(frequencies[chosen].sum()), np.uint16)
    levels = np.empty((len(chosen), LEVELS), np.float32)
    begins = np.empty((len(chosen), windows + 1), np.uint32)
    tops = np.empty((len(chosen), windows), np.uint8)
    pack_impacts(rows, tfs, starts, chosen, lengths, norm, postings, levels, begins, tops)
    return (first_term + chosen).astype(np.uint32), postings, levels, begins, tops


def _commit(work: Path, files: dict[str, BinaryIO], done: _Merged) -> None:
    for name, file in files.items():
        file.flush()
        os.fsync(file.fileno())
        done.sizes[name] = file.tell()
    write_atomically(work / MERGE_FILE, orjson.dumps(asdict(done)), durable=True)


def _resume(work: Path) -> _Merged:
    folder = work / FOLDER
    found = hints(work / MERGE_FILE)
    if not found.keys() <= {field.name for field in fields(_Merged)}:  # of another version: start anew
        return _Merged()
    done = _Merged(**found)
    whole = done.sizes.keys() == set(_PACKED_FILES) and all(
        (folder / name).exists() and (folder / name).stat().st_size >= size
        for name, size in done.sizes.items()
    )
    return done if whole else _Merged()


def _write_terms(work: Path, folder: Path, frequencies: np.ndarray) -> None:
    """Write what a term is looked up in, and the first block of each."""
    text = (work / RUN_VOCABULARY).read_bytes()
    terms = text.split(b"\n")[:-1]
    order = np.array(sorted(range(len(terms)), key=terms.__getitem__), np.uint32)
    ends = np.cumsum(np.fromiter(map(len, terms), np.uint64, len(terms)) + np.uint64(1), dtype=np.uint64)
    blocks = np.cumsum((frequencies + BLOCK - 1) // BLOCK)
    (folder / names.TEXT_FILE).write_bytes(text)
    (folder / names.ORDER_FILE).write_bytes(order.data)
    (folder / names.OFFSETS_FILE).write_bytes(np.concatenate([np.zeros(1, np.uint64), ends]).data)
    first_block = np.concatenate([[0], blocks[:-1]]).astype(np.uint32) if len(blocks) else blocks
    (folder / names.FIRST_BLOCK_FILE).write_bytes(first_block.astype(np.uint32).tobytes())
