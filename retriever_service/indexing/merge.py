"""Making one index of the segments of another, without its deleted passages. Can be killed and gone on with.

The passages are copied as a build writes them, and the postings of the segments are merged as a build merges
its runs. Without deletions the files are those of an index that was built from all passages at once, byte for
byte.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from retriever_service.bm25.packed import build as runs
from retriever_service.bm25.packed.files import open_packed
from retriever_service.bm25.packed.joined import JoinedPostings
from retriever_service.index_folder.corpus import Passage
from retriever_service.index_folder.description import REPLACED, IndexInfo, read_info, work_of
from retriever_service.index_folder.segments import (
    SegmentedDocuments,
    SegmentedRows,
    folders_of,
    read_deletions,
)
from retriever_service.indexing.build import require_free, silent
from retriever_service.indexing.changes import packed_info
from retriever_service.indexing.parts import Progress
from retriever_service.indexing.scan import Scanner
from retriever_service.indexing.workplace import (
    Key,
    changing,
    folder_meant,
    full_disk_said,
    put,
    seal_folder,
    sealed,
)
from services.common.files import write_atomically

TERMS_DONE = "run.done"
"""Says that RUN_LENGTHS and RUN_VOCABULARY are whole. Earlier versions wrote their runs before it, too."""
_SCAN_BYTES = 36
"""Of each passage, beside its place in the new index: the hashes of its id and its url, its line, the place
of its other fields where no passage has any, and its length."""
_IMPACT_BYTES = 2
"""Of each posting of a segment that has no impacts yet: an earlier version built it."""


def merge_index(index: str | Path, *, progress: Progress | None = None) -> IndexInfo:
    """Make one segment of an index's segments, without the deleted passages. The same command goes on where
    it was killed; the index stays as it was until the merged one is whole.

    Raises IndexInvalid for an index that has no segments, EnvironmentLacks as a build does.
    """
    index = folder_meant(index)
    tell = progress or silent
    if not (work_of(index) / REPLACED).exists():
        read_info(index)  # before a folder is made beside it
    with changing(index) as work:
        info = packed_info(index)
        if not info.segments and not info.deletions:
            if [path.name for path in work.iterdir()] == ["lock"]:
                shutil.rmtree(work)
            return info
        key: Key = {
            "format": info.format,
            "backend": info.backend,
            # It changes with each addition and deletion: what was merged before one is not gone on with.
            "corpus_sha256": info.corpus_sha256,
            "settings": info.settings,
            "by": "merge",
        }
        if not sealed(work, key):
            merge = _Merge(index, info, work, tell)
            require_free(work, merge.bytes_needed(), "for the merge; the index stays as it is")
            with full_disk_said(work):
                merge.run(key)
        put(work, index)
    return read_info(index)


class _Merge:
    """A merge at work in the folder `work`."""

    def __init__(self, index: Path, info: IndexInfo, work: Path, tell: Progress) -> None:
        self._index = index
        self._info = info
        self._work = work
        self._tell = tell
        self._folders = folders_of(index, info)
        self._deleted = read_deletions(index, info)["rows"]

    def bytes_needed(self) -> int:
        """Of the merged index while it is made: the files of all segments and what only the making needs,
        less the share of the deleted passages."""
        segments = [open_packed(folder) for folder in self._folders]
        rows = sum(len(segment.lengths) for segment in segments)
        files = sum(path.stat().st_size for path in self._index.rglob("*") if path.is_file())
        terms = sum(len(segment.text) for segment in segments)
        new = sum(
            int(segment.frequencies.sum(dtype=np.int64)) for segment in segments if segment.impacts is None
        )
        kept = 1 - len(self._deleted) / max(rows, 1)
        return round(kept * (files + terms + _IMPACT_BYTES * new + _SCAN_BYTES * rows))

    def run(self, key: Key) -> None:
        """Fill the folder and seal it."""
        info = self._info
        work = self._work
        documents = SegmentedDocuments(self._folders)
        rows = SegmentedRows(self._folders, documents, self._deleted)
        kept = np.ones(documents.count, bool)
        kept[self._deleted] = False
        scanner = Scanner(
            self._index, work, [], key, skip_bad=False,
            passages=lambda start: _passages(documents, rows, kept, start),
        )  # fmt: skip
        total = documents.count
        state = scanner.run(lambda s: self._tell("copy", s.position / total, f"{s.passages:,} passages"))
        for name in set(runs.RUN_FILES) - {runs.RUN_LENGTHS, runs.RUN_VOCABULARY}:
            (work / name).unlink(missing_ok=True)  # of a merge that an earlier version began
        postings = JoinedPostings([open_packed(folder) for folder in self._folders], kept)
        # The mark comes last: after a kill these files are either whole or written anew.
        if not (work / TERMS_DONE).exists():
            _write(work / runs.RUN_LENGTHS, [postings.lengths.tobytes()])
            _write(work / runs.RUN_VOCABULARY, postings.vocabulary())
            write_atomically(work / TERMS_DONE, "", durable=True)
        runs.write_packed(
            work,
            k1=info.settings["k1"],
            b=info.settings["b"],
            progress=lambda done, of: self._tell("merge", done / max(of, 1), f"{done:,} postings"),
            postings=postings,
        )
        documents.close()
        description = {
            "format": info.format,
            "backend": info.backend,
            "corpus": info.corpus,
            "corpus_sha256": info.corpus_sha256,
            "corpus_bytes": info.corpus_bytes,
            "passages": state.passages,
            "skipped": info.skipped,
            "skipped_reasons": info.skipped_reasons,
            "settings": info.settings,
        }
        seal_folder(work, description, [*runs.RUN_FILES, TERMS_DONE])
        self._tell("done", 1.0, f"{state.passages:,} passages")


def _passages(
    documents: SegmentedDocuments, rows: SegmentedRows, kept: np.ndarray, start: int
) -> Iterator[Passage]:
    for row in range(start, documents.count):
        if kept[row]:
            fields = rows.row(row)
            identity = fields.pop("id")
            yield Passage(identity, fields.pop("contents"), row + 1, row + 1, fields)


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())
