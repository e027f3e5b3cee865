"""What a scan writes beside the documents: postings for BM25, vectors for dense search. A hybrid index gets
both."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from retriever_service.bm25.analysis import Analyzer, TermIds
from retriever_service.dense.build import flat_header
from retriever_service.dense.encoder import Encoder


class Sink(Protocol):
    """Writes to append-only files, which the scanner opens, syncs and cuts back when a build goes on."""

    files: tuple[str, ...]
    chunk_passages: int
    """Most passages between two points from which a build can go on."""

    def open(self, folder: Path, files: dict[str, BinaryIO]) -> None:
        """Take the files, positioned where the last whole chunk ended."""

    def write(self, texts: list[str]) -> None:
        """Add one chunk of passages."""


class PostingsSink:
    """Arrays by passage: `terms` uint32 and `tfs` uint16 (one for each passage and term), `counts` uint32
    (terms of each passage), `lengths` uint32 (tokens of each passage), and the `vocabulary`, one term a line
    in the order of first sight."""

    files: tuple[str, ...] = ("terms", "tfs", "counts", "lengths", "vocabulary")
    chunk_passages = 20_000

    def __init__(self, analyzer: Analyzer) -> None:
        self._analyzer = analyzer

    def open(self, folder: Path, files: dict[str, BinaryIO]) -> None:
        self._files = files
        self.vocabulary = (folder / "vocabulary").read_text("utf-8").split("\n")[:-1]
        self._known = {term: i for i, term in enumerate(self.vocabulary)}
        self._term_ids = TermIds(self._analyzer, self._number)

    def _number(self, term: str) -> int:
        number = self._known.get(term)
        if number is None:
            number = self._known[term] = len(self.vocabulary)
            self.vocabulary.append(term)
        return number

    def write(self, texts: list[str]) -> None:
        flat: list[int] = []
        lengths = []
        first_new = len(self.vocabulary)
        for text in texts:
            ids = self._term_ids(text)
            lengths.append(len(ids))
            flat += ids
        width = max(len(self.vocabulary), 1)
        owner = np.repeat(np.arange(len(texts), dtype=np.int64), lengths)
        keys, tfs = np.unique(owner * width + np.array(flat, np.int64), return_counts=True)
        counts = np.bincount(keys // width, minlength=len(texts))
        files = self._files
        files["terms"].write((keys % width).astype(np.uint32).tobytes())
        files["tfs"].write(np.minimum(tfs, 65535).astype(np.uint16).tobytes())
        files["counts"].write(counts.astype(np.uint32).tobytes())
        files["lengths"].write(np.array(lengths, np.uint32).tobytes())
        files["vocabulary"].write("".join(term + "\n" for term in self.vocabulary[first_new:]).encode())


class VectorSink:
    """A flat FAISS file, written as the passages are encoded; its header is put right at the end."""

    files: tuple[str, ...] = ("vectors",)
    chunk_passages = 2_000

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def open(self, folder: Path, files: dict[str, BinaryIO]) -> None:
        self._file = files["vectors"]
        if not self._file.tell():
            self._file.write(flat_header(self._encoder.dimension, 0))

    def write(self, texts: list[str]) -> None:
        self._file.write(self._encoder.passages(texts).tobytes())
