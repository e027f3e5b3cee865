"""What a scan writes beside the documents: postings for BM25, vectors for dense search. A hybrid index gets
both."""

from __future__ import annotations

import time
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from retriever_service.bm25.analysis import Analyzer, TermIds
from retriever_service.bm25.packed import build as runs
from retriever_service.dense.build import flat_header
from retriever_service.dense.encoding import PART, PassageEncoder


class Sink(Protocol):
    """Writes to append-only files, which the scanner opens, syncs and cuts back when a build goes on."""

    files: tuple[str, ...]
    chunk_passages: int
    """Most passages between two points from which a build can go on, but for `together`."""
    together: int
    """Chunks that it takes in one write, to work on them side by side."""

    def open(self, folder: Path, files: dict[str, BinaryIO]) -> None:
        """Take the files, positioned where the last whole chunk ended."""

    def write(self, texts: list[str]) -> None:
        """Add one chunk of passages, or `together` of them."""

    def note(self) -> str:
        """How fast it is, for the progress; empty where that is nobody's concern."""


class _Vocabulary:
    """Numbers of terms, in the order of their first sight. The terms stand one a line in a file that is only
    appended to."""

    def __init__(self, analyzer: Analyzer, path: Path, file: BinaryIO) -> None:
        self.terms = path.read_text("utf-8").split("\n")[:-1]
        self._known = {term: i for i, term in enumerate(self.terms)}
        self._term_ids = TermIds(analyzer, self._number)
        self._file = file
        self._written = len(self.terms)

    def _number(self, term: str) -> int:
        number = self._known.get(term)
        if number is None:
            number = self._known[term] = len(self.terms)
            self.terms.append(term)
        return number

    def numbers(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of the terms of all texts, int64, with repeats; how many are of each text). New terms are
        written."""
        flat: list[int] = []
        lengths = []
        for text in texts:
            ids = self._term_ids(text)
            lengths.append(len(ids))
            flat += ids
        self._file.write("".join(term + "\n" for term in self.terms[self._written :]).encode())
        self._written = len(self.terms)
        return np.array(flat, np.int64), np.array(lengths, np.int64)


class PostingsSink:
    """Arrays by passage: `terms` uint32 and `tfs` uint16 (one for each passage and term), `counts` uint32
    (terms of each passage), `lengths` uint32 (tokens of each passage), and the `vocabulary`, one term a line
    in the order of first sight."""

    files: tuple[str, ...] = ("terms", "tfs", "counts", "lengths", "vocabulary")
    chunk_passages = 20_000
    together = 1

    def __init__(self, analyzer: Analyzer) -> None:
        self._analyzer = analyzer

    def open(self, folder: Path, files: dict[str, BinaryIO]) -> None:
        self._files = files
        self._vocabulary = _Vocabulary(self._analyzer, folder / "vocabulary", files["vocabulary"])

    @property
    def vocabulary(self) -> list[str]:
        """All terms so far, by their numbers."""
        return self._vocabulary.terms

    def write(self, texts: list[str]) -> None:
        flat, lengths = self._vocabulary.numbers(texts)
        width = max(len(self.vocabulary), 1)
        owner = np.repeat(np.arange(len(texts), dtype=np.int64), lengths)
        keys, tfs = np.unique(owner * width + flat, return_counts=True)
        counts = np.bincount(keys // width, minlength=len(texts))
        files = self._files
        files["terms"].write((keys % width).astype(np.uint32).tobytes())
        files["tfs"].write(np.minimum(tfs, 65535).astype(np.uint16).tobytes())
        files["counts"].write(counts.astype(np.uint32).tobytes())
        files["lengths"].write(lengths.astype(np.uint32).tobytes())

    def note(self) -> str:
        return ""


class RunsSink:
    """A sorted run of postings per chunk, for `retriever_service.bm25.packed.build`."""

    files: tuple[str, ...] = runs.RUN_FILES
    chunk_passages = 20_000
    together = 1

    def __init__(self, analyzer: Analyzer) -> None:
        self._analyzer = analyzer

    def open(self, folder: Path, files: dict[str, BinaryIO]) -> None:
        self._files = files
        self._vocabulary: _Vocabulary | None = _Vocabulary(
            self._analyzer, folder / runs.RUN_VOCABULARY, files[runs.RUN_VOCABULARY]
        )
        self._rows = files[runs.RUN_LENGTHS].tell() // 4

    def close(self) -> None:
        """Give the memory of the vocabulary back: the merge reads the file."""
        self._vocabulary = None

    def write(self, texts: list[str]) -> None:
        assert self._vocabulary is not None  # it is open
        flat, lengths = self._vocabulary.numbers(texts)
        size = len(texts)
        owner = np.repeat(np.arange(size, dtype=np.int64), lengths)
        keys, tfs = np.unique(flat * size + owner, return_counts=True)
        terms, counts = np.unique(keys // size, return_counts=True)
        files = self._files
        files[runs.RUN_TERMS].write(terms.astype(np.uint32).tobytes())
        files[runs.RUN_COUNTS].write(counts.astype(np.uint32).tobytes())
        files[runs.RUN_ROWS].write((keys % size).astype(np.uint16).tobytes())
        files[runs.RUN_FIRSTS].write(np.array([self._rows], np.uint32).tobytes())
        files[runs.RUN_TFS].write(np.minimum(tfs, 65535).astype(np.uint16).tobytes())
        files[runs.RUN_SIZES].write(np.array([len(terms), len(keys)], np.uint64).tobytes())
        files[runs.RUN_LENGTHS].write(lengths.astype(np.uint32).tobytes())
        self._rows += size

    def note(self) -> str:
        return ""


class VectorSink:
    """A flat FAISS file, written as the passages are encoded; its header is put right at the end."""

    files: tuple[str, ...] = ("vectors",)
    chunk_passages = PART

    def __init__(self, encoder: PassageEncoder, together: int = 1) -> None:
        self._encoder = encoder
        self.together = together
        self._seconds = 0.0
        self._before = encoder.tokens

    def open(self, folder: Path, files: dict[str, BinaryIO]) -> None:
        self._file = files["vectors"]
        if not self._file.tell():
            self._file.write(flat_header(self._encoder.dimension, 0))

    def write(self, texts: list[str]) -> None:
        begun = time.monotonic()
        self._file.write(self._encoder.passages(texts).tobytes())
        self._seconds += time.monotonic() - begun

    def note(self) -> str:
        if not self._seconds:
            return ""
        return f"{(self._encoder.tokens - self._before) / self._seconds:,.0f} tokens/s"
