"""Published FAISS files beside a plain corpus (`e5_Flat.index`, `wiki-18.jsonl`): searched as they are, both
memory-mapped.

Only its lines are looked at once, each of which must be a passage, and their positions kept beside it, or in
a folder of this user's own.
"""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from pathlib import Path

from retriever_service.dense.encoder import Encoder, EncoderSettings, family_of
from retriever_service.dense.on_device import OnDevice
from retriever_service.dense.search import DenseRanker
from retriever_service.index_folder.description import IndexInfo
from retriever_service.index_folder.documents import Documents, encode_document
from retriever_service.index_folder.passages import Row, parse_line
from retriever_service.ranking import Reranker
from retriever_service.search.search_index import RankedIndex
from services.common.errors import EnvironmentLacks, UserError
from services.common.files import written_aside
from services.common.private_folder import is_own_file, private_folder
from services.common.records import layout_of


class CorpusDocuments(Documents):
    """The passages of a plain JSONL corpus, where they lie."""

    def __init__(self, text: Path, offsets: Path) -> None:
        super().__init__(text, offsets)
        self._path = text
        self.get(0)
        self.get(self.count - 1)

    def raw(self, row: int) -> bytes:
        found = self._row(row)
        return encode_document(found.id, found.contents, found.fields.get("url"))

    def get(self, row: int) -> tuple[str, str]:
        """Id and contents of one passage. Raises UserError, with its line, for one that is malformed."""
        found = self._row(row)
        return found.id, found.contents

    def _row(self, row: int) -> Row:
        return parse_line(self._path, row + 1, super().raw(row))


def open_corpus_documents(corpus: Path) -> CorpusDocuments:
    """Random access to a plain JSONL file. Raises UserError for one of another layout, which has no
    positions."""
    kind = layout_of(corpus)
    if kind.format == "empty":
        raise UserError(f"corpus {corpus}: holds no passage")
    if not kind.plain_lines or kind.packing:
        raise UserError(
            f"corpus {corpus}: a FAISS file is served beside plain JSONL only; `unspiral index convert` "
            "takes other corpora"
        )
    stat = corpus.stat()
    name = f"{corpus.name}.{stat.st_size}.{stat.st_mtime_ns}.offsets"
    places = [corpus.with_name(name)]
    with contextlib.suppress(OSError):  # without a folder of its own, the corpus's folder is the only place
        same = hashlib.blake2b(bytes(corpus.resolve()), digest_size=8).hexdigest()  # corpora may share a name
        places.append(private_folder() / f"{same}.{name}")
    # What another user put there could have passages served under the numbers of others.
    found = next((place for place in places if is_own_file(place, stat.st_uid)), None)
    if found is None:
        offsets = line_offsets(corpus)
        found = next((place for place in places if _kept(offsets, place)), None)
        if found is None:
            folders = " or in ".join(str(place.parent) for place in places)
            size = len(offsets) * 8 / 2**20
            raise EnvironmentLacks(
                f"corpus {corpus}: {size:.1f} MiB for the places of its lines can't be written in {folders}"
            )
    return CorpusDocuments(corpus, found)


def line_offsets(path: Path) -> array[int]:
    """Start of each line and the end of the last, uint64. A last line without line break counts as if it had
    one.

    Raises UserError for the first line that is no passage, so that a corpus is served whole or not at all.
    """
    offsets = array("Q", [0])
    position = 0
    raw = b""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            parse_line(path, number, raw)
            position += len(raw)
            offsets.append(position)
    if not raw.endswith(b"\n"):
        offsets[-1] += 1
    return offsets


def _kept(offsets: array[int], place: Path) -> bool:
    """Write a file whole or not at all, though other processes may write it too. Returns False where it
    cannot be written."""
    try:
        with written_aside(place) as aside, aside.open("wb") as file:
            offsets.tofile(file)
    except OSError:
        return False
    return True


class PublishedIndex(RankedIndex):
    """A FAISS file and the corpus that it was made from, row for row. The file does not name its encoder:
    `model` and `name` (its family) must."""

    def __init__(
        self,
        path: str,
        corpus: str | None,
        *,
        name: str | None,
        model: str | None,
        gpu: bool = False,
        on_device: OnDevice | None = None,
        dtype: str = "auto",
        reranker: Reranker | None = None,
        rerank_depth: int = 20,
    ) -> None:
        if not corpus or not model:
            raise UserError(
                f"index {path} is a FAISS file: it needs --corpus_path (the JSONL it was made from) and "
                "--retriever_model"
            )
        documents = open_corpus_documents(Path(corpus))
        encoder = Encoder(EncoderSettings(model, family_of(name, model)), dtype=dtype)
        info = IndexInfo(
            backend="dense",
            corpus=corpus,
            corpus_bytes=Path(corpus).stat().st_size,
            passages=documents.count,
            settings={"encoder": encoder.settings.as_dict()},
            bytes=Path(path).stat().st_size,
        )
        ranker = DenseRanker(Path(path), encoder, documents.count, gpu=gpu, on_device=on_device)
        super().__init__(info, documents, ranker, reranker=reranker, rerank_depth=rerank_depth)
