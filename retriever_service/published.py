"""Published FAISS files beside a plain corpus (`e5_Flat.index`, `wiki-18.jsonl`): searched as they are, both memory-mapped.

Only the positions of the corpus's lines are computed, once, and kept beside the corpus (or in the temporary folder).
"""

from __future__ import annotations

import codecs
import tempfile
from pathlib import Path

import numpy as np

from .corpus import is_parquet, parse_passage
from .documents import Documents, encode_document
from .errors import BadSetting, CorpusError
from .index import FORMAT, Index, IndexInfo

_BLOCK = 16 << 20


class CorpusDocuments(Documents):
    """The passages of a plain JSONL corpus, where they lie."""

    def __init__(self, text: Path, offsets: Path) -> None:
        super().__init__(text, offsets)
        self._path = text
        self.get(0)
        self.get(self.count - 1)

    def raw(self, row: int) -> bytes:
        return encode_document(*self.get(row))

    def get(self, row: int) -> tuple[str, str]:
        """Id and contents of one passage. Raises CorpusError, with its line, for one that is malformed."""
        line = super().raw(row)
        try:
            return parse_passage(line.removeprefix(codecs.BOM_UTF8) if row == 0 else line)
        except ValueError as error:
            raise CorpusError(f"corpus {self._path}:{row + 1}: {error}") from None


def open_corpus_documents(corpus: Path) -> CorpusDocuments:
    """Random access to a plain JSONL file. Raises BadSetting for a compressed or Parquet one, which has no positions."""
    if is_parquet(corpus) or corpus.open("rb").read(2) == b"\x1f\x8b":
        raise BadSetting(
            f"corpus {corpus}: a FAISS file is served beside plain JSONL only; `unspiral index convert` takes other corpora"
        )
    stat = corpus.stat()
    name = f"{corpus.name}.{stat.st_size}.{stat.st_mtime_ns}.offsets"
    places = [corpus.with_name(name), Path(tempfile.gettempdir()) / name]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        offsets = line_offsets(corpus)
        for place in places:
            try:
                aside = place.with_name(place.name + ".new")
                aside.write_bytes(offsets.tobytes())
                aside.replace(place)
            except OSError:
                continue
            found = place
            break
    return CorpusDocuments(corpus, found)


def line_offsets(path: Path) -> np.ndarray:
    """Start of each line and the end of the last, uint64. A last line without line break counts as if it had one."""
    parts, position, last = [np.zeros(1, np.uint64)], 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            parts.append(np.flatnonzero(np.frombuffer(block, np.uint8) == 10).astype(np.uint64) + np.uint64(position + 1))
            position, last = position + len(block), block[-1:]
    if last != b"\n":
        parts.append(np.array([position + 1], np.uint64))
    return np.concatenate(parts)


class PublishedIndex(Index):
    """A FAISS file and the corpus that it was made from, row for row. The file says nothing of its encoder: name and model must."""

    def __init__(
        self,
        path: str,
        corpus: str | None,
        *,
        name: str | None,
        model: str | None,
        gpu: bool = False,
        dtype: str = "auto",
        reranker=None,
        rerank_depth: int = 20,
    ) -> None:
        from .dense import DenseRanker
        from .encoder import Encoder, EncoderSettings, family_of

        if not corpus or not model:
            raise BadSetting(
                f"index {path} is a FAISS file: it needs --corpus_path (the JSONL it was made from) and --retriever_model"
            )
        self.documents = open_corpus_documents(Path(corpus))
        encoder = Encoder(EncoderSettings(model, family_of(name, model)), dtype=dtype)
        self.ranker = DenseRanker(Path(path), encoder, self.documents.count, gpu=gpu)
        self.reranker, self._depth, self.quick = reranker, rerank_depth, False
        size = Path(path).stat().st_size
        self.info = IndexInfo(
            FORMAT,
            "dense",
            corpus,
            "",
            Path(corpus).stat().st_size,
            self.documents.count,
            0,
            [],
            {"encoder": encoder.settings.as_dict()},
            {},
            size,
        )
        self.ranker.rank(["warm up"], 1)
