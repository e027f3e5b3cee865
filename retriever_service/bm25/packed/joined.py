"""The postings of several packed segments as those of one index, without the passages that go.

Each segment has its terms in the order in which the new index numbers them, as far as both have them, and
its lists are ascending. So they are unpacked when they are merged, and no run of them lies on the disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from retriever_service.bm25.packed.blocks import compiled, find_term, unpack_list
from retriever_service.bm25.packed.build import gather
from retriever_service.bm25.packed.files import PackedFiles

_GROUP_POSTINGS = 1 << 22
_GONE = -1


@compiled
def unpack_terms(
    words, firsts, places, widths, first_block, frequencies, terms, new_rows, counts, rows, tfs
):  # fmt: skip
    """Unpack the lists of some terms, one behind another, with new row numbers (`new_rows`, -1 for a row that
    goes). `counts` [terms] says how many postings of each are left. Returns how many are left in all."""
    longest = 0
    for i in range(len(terms)):
        longest = max(longest, np.int64(frequencies[terms[i]]))
    own_rows = np.empty(longest, np.int32)
    own_tfs = np.empty(longest, np.int32)
    at = 0
    for i in range(len(terms)):
        term = terms[i]
        size = np.int64(frequencies[term])
        unpack_list(words, firsts, places, widths, np.int64(first_block[term]), size, own_rows, own_tfs)
        begin = at
        for p in range(size):
            row = new_rows[own_rows[p]]
            if row >= 0:
                rows[at] = row
                tfs[at] = own_tfs[p]
                at += 1
        counts[i] = at - begin
    return at


@compiled
def find_terms(text, offsets, order, own_text, own_offsets, found):
    """As `find_term` for each term of another vocabulary: `found` int64 [its terms]."""
    for term in range(len(found)):
        begin = np.int64(own_offsets[term])
        end = np.int64(own_offsets[term + 1]) - 1
        found[term] = find_term(text, offsets, order, own_text[begin:end])


@dataclass
class _Part:
    """One segment. `terms` are those with a posting left, by their numbers in the new index, `numbers`."""

    files: PackedFiles
    new_rows: np.ndarray
    terms: np.ndarray
    numbers: np.ndarray
    at: int = 0
    """How many of the terms were read."""


class JoinedPostings:
    """The protocol `retriever_service.bm25.packed.build.Postings` over segments.

    Terms are numbered in the order of their first sight, as a build numbers them. Memory is that of a few
    numbers per term, and of the text of those that the first segment lacks.
    """

    def __init__(self, segments: Sequence[PackedFiles], kept: np.ndarray) -> None:
        """kept: bool [rows of all segments]; the others go, and the rows behind them move up."""
        new_rows = np.where(kept, np.cumsum(kept) - 1, _GONE).astype(np.int32)
        self.lengths = np.concatenate([segment.lengths for segment in segments])[kept]
        """Terms of each passage that is left, with repeats: uint32."""
        self._parts: list[_Part] = []
        self._first = segments[0]
        self._of_first = np.zeros(0, np.int64)
        self._own = 0
        """How many terms of the first segment stay; they come first."""
        self._added: dict[bytes, int] = {}
        counts = []
        begin = 0
        for segment in segments:
            rows = new_rows[begin : begin + len(segment.lengths)]
            begin += len(rows)
            left = _left(segment, rows)
            numbers = self._numbered(segment, left)
            terms = np.flatnonzero(left)
            terms = terms[np.argsort(numbers[terms], kind="stable")].astype(np.uint32)
            self._parts.append(_Part(segment, rows, terms, numbers[terms].astype(np.uint32)))
            counts.append(left[terms])
        self.frequencies = np.zeros(self._own + len(self._added), np.int64)
        """Postings of each term, int64 [terms]."""
        for part, count in zip(self._parts, counts, strict=True):
            self.frequencies[part.numbers] += count

    def _numbered(self, segment: PackedFiles, left: np.ndarray) -> np.ndarray:
        """The numbers of a segment's terms in the new index; those of terms that go mean nothing."""
        if not self._parts:
            self._of_first = np.where(left > 0, np.cumsum(left > 0) - 1, _GONE)
            self._own = int(np.count_nonzero(left))
            return self._of_first
        found = np.empty(len(left), np.int64)
        first = self._first
        find_terms(first.text, first.offsets, first.order, segment.text, segment.offsets, found)
        numbers = np.where(found >= 0, self._of_first[found], _GONE)
        text = segment.text
        offsets = segment.offsets
        for term in np.flatnonzero((numbers == _GONE) & (left > 0)).tolist():
            word = text[int(offsets[term]) : int(offsets[term + 1]) - 1].tobytes()
            numbers[term] = self._added.setdefault(word, self._own + len(self._added))
        return numbers

    def vocabulary(self) -> Iterator[bytes]:
        """The terms by their numbers, a line break after each, in pieces."""
        first = self._first
        if self._own == len(first.frequencies):
            yield first.text.tobytes()
        else:
            lines = first.text.tobytes().split(b"\n")
            yield b"".join(lines[term] + b"\n" for term in np.flatnonzero(self._of_first >= 0).tolist())
        yield b"".join(term + b"\n" for term in self._added)

    def seek(self, term: int) -> None:
        """As Postings."""
        for part in self._parts:
            part.at = int(np.searchsorted(part.numbers, term))

    def read(self, last: int, cursor: np.ndarray, rows: np.ndarray, tfs: np.ndarray) -> None:
        """As Postings."""
        for part in self._parts:
            end = int(np.searchsorted(part.numbers, last))
            terms = part.terms[part.at : end]
            numbers = part.numbers[part.at : end]
            part.at = end
            for group in _groups(part.files.frequencies[terms]):
                own_counts, own_rows, own_tfs = _unpacked(part.files, terms[group], part.new_rows)
                gather(numbers[group], own_counts, own_rows, own_tfs, 0, last, cursor, rows, tfs)


def _unpacked(
    segment: PackedFiles, terms: np.ndarray, new_rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How many postings of each term are left, and the rows and term frequencies of these."""
    most = int(segment.frequencies[terms].sum(dtype=np.int64))
    rows = np.empty(most, np.uint32)
    tfs = np.empty(most, np.uint16)
    counts = np.empty(len(terms), np.uint32)
    unpack_terms(
        *segment.blocks[:4], *segment.blocks[5:], terms.astype(np.int64), new_rows, counts, rows, tfs
    )
    return counts, rows, tfs


def _left(segment: PackedFiles, new_rows: np.ndarray) -> np.ndarray:
    """How many passages with each term stay."""
    if (new_rows >= 0).all():
        return segment.frequencies
    left = np.zeros(len(segment.frequencies), np.uint32)
    terms = np.arange(len(left))
    for group in _groups(segment.frequencies):
        left[group] = _unpacked(segment, terms[group], new_rows)[0]
    return left


def _groups(frequencies: np.ndarray) -> Iterator[slice]:
    """Slices of terms with about _GROUP_POSTINGS postings each."""
    ends = np.cumsum(frequencies, dtype=np.int64)
    begin = 0
    while begin < len(ends):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + _GROUP_POSTINGS, "right")))
        yield slice(begin, end)
        begin = end
