"""The parts of an index folder while it is built: what each keeps of the passages, and writes at the end.

`retriever_service.search.index` opens them, and `retriever_service.index_folder.description` lists the parts
of each backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from retriever_service.bm25.analysis import Analyzer, AnalyzerSettings
from retriever_service.bm25.build import write_bm25
from retriever_service.bm25.packed.build import write_packed
from retriever_service.dense.build import stored_bytes, write_dense
from retriever_service.dense.encoder import Encoder, EncoderSettings, family_of
from retriever_service.dense.encoding import EncoderPool, automatic
from retriever_service.index_folder.description import IndexSettings
from retriever_service.indexing.sinks import PostingsSink, RunsSink, Sink, VectorSink
from services.common.errors import UserError

Progress = Callable[[str, float, str], None]
"""Told the stage, the share done (0 to 1) and a short text."""


class Part(Protocol):
    """One part of an index folder, such as the postings of BM25."""

    @property
    def settings(self) -> IndexSettings:
        """The settings that queries must be treated with, too."""

    @property
    def sink(self) -> Sink:
        """What the scan hands the passages to."""

    @property
    def vector_bytes(self) -> int:
        """Bytes of disk that the vectors of one passage take while the part is built."""

    def write(self, work: Path, passages: int, tell: Progress) -> None:
        """Make the part from what the sink has written into the folder `work`."""

    def close(self) -> None:
        """The sink is written to no more."""


class BM25Part:
    """Postings and their scores."""

    vector_bytes = 0

    def __init__(self, language: str, stem: bool, stop_words: bool, k1: float, b: float) -> None:
        if not 0 < k1 < math.inf or not 0 <= b <= 1:
            raise UserError(f"k1 {k1}, b {b}: k1 must be a number above 0 and b from 0 to 1")
        analyzer = Analyzer(AnalyzerSettings(language, stem, stop_words))
        self.settings: IndexSettings = {"analyzer": analyzer.settings.as_dict(), "k1": k1, "b": b}
        self.sink = PostingsSink(analyzer)
        self._k1 = k1
        self._b = b

    def write(self, work: Path, passages: int, tell: Progress) -> None:
        """As Part."""

        def note(done: int, of: int) -> None:
            tell("invert", done / of, "")

        write_bm25(work, work, self.sink.vocabulary, k1=self._k1, b=self._b, progress=note)

    def close(self) -> None:
        """As Part."""


class PackedPart:
    """Packed postings: as BM25Part otherwise."""

    vector_bytes = 0

    def __init__(self, language: str, stem: bool, stop_words: bool, k1: float, b: float) -> None:
        plain = BM25Part(language, stem, stop_words, k1, b)
        self.settings: IndexSettings = {**plain.settings, "postings": "packed"}
        self.sink = RunsSink(Analyzer(AnalyzerSettings(language, stem, stop_words)))

    def write(self, work: Path, passages: int, tell: Progress) -> None:
        """As Part."""

        def note(done: int, of: int) -> None:
            tell("merge", done / of, f"{done:,} postings")

        write_packed(work, k1=self.settings["k1"], b=self.settings["b"], progress=note)

    def close(self) -> None:
        """As Part."""
        self.sink.close()


class DensePart:
    """Vectors of a sentence encoder in a FAISS index."""

    def __init__(
        self,
        model: str,
        family: str | None,
        vector_type: str,
        nprobe: int | None,
        ef_search: int | None,
        dtype: str,
        processes: int = 0,
    ) -> None:
        encoder = Encoder(EncoderSettings(model, family_of(family, model)), dtype=dtype)
        self.settings: IndexSettings = {
            "encoder": encoder.settings.as_dict(),
            "fingerprint": encoder.fingerprint,
            "type": vector_type,
            "dtype": encoder.dtype,
            "nprobe": nprobe,
            "ef_search": ef_search,
        }
        count = processes or automatic()
        self._pool = EncoderPool(encoder, count) if count > 1 else None
        self.sink = VectorSink(encoder) if self._pool is None else VectorSink(self._pool, count)
        self._dimension = encoder.dimension
        self._type = vector_type
        stored = stored_bytes(encoder.dimension, vector_type)
        # Any other type than Flat is made from flat vectors, which lie on the disk beside it meanwhile.
        self.vector_bytes = stored if vector_type == "Flat" else 4 * encoder.dimension + stored

    def write(self, work: Path, passages: int, tell: Progress) -> None:
        """As Part."""

        def note(done: int, of: int) -> None:
            tell("vectors", done / of, "")

        write_dense(work, self._dimension, passages, self._type, note)

    def close(self) -> None:
        """As Part."""
        if self._pool is not None:
            self._pool.close()
