"""Making one index of the segments of another, without its deleted passages. Can be killed and gone on with.

The passages are copied as a build writes them, the postings of each segment are unpacked into a sorted run,
and the runs are merged as at a build. Without deletions the files are those of an index that was built from
all passages at once, byte for byte.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from retriever_service.bm25.kernel import compiled
from retriever_service.bm25.packed import build as runs
from retriever_service.bm25.packed.blocks import unpack_list
from retriever_service.bm25.packed.files import PackedFiles, open_packed
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
    full_disk_said,
    put,
    seal_folder,
    sealed,
)
from services.common.files import write_atomically

RUNS_DONE = "run.done"
_GROUP_POSTINGS = 1 << 22
_RUN_BYTES = 6
"""Of each posting in a run: its row and its term frequency."""
_SCAN_BYTES = 16
"""Of each passage while it is copied: the hash of its id, and its line."""


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


def merge_index(index: str | Path, *, progress: Progress | None = None) -> IndexInfo:
    """Make one segment of an index's segments, without the deleted passages. The same command goes on where
    it was killed; the index stays as it was until the merged one is whole.

    Raises IndexInvalid for an index that has no segments, EnvironmentLacks as a build does.
    """
    index = Path(index).resolve()
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
        """Of the merged index while it is made: the files of all segments and the runs, less the share of the
        deleted passages."""
        segments = [open_packed(folder) for folder in self._folders]
        rows = sum(len(segment.lengths) for segment in segments)
        postings = sum(int(segment.frequencies.sum(dtype=np.int64)) for segment in segments)
        files = sum(path.stat().st_size for path in self._index.rglob("*") if path.is_file())
        kept = 1 - len(self._deleted) / max(rows, 1)
        return round(kept * (files + _RUN_BYTES * postings + _SCAN_BYTES * rows))

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
        # The mark comes last: after a kill the runs are either whole or written anew.
        if not (work / RUNS_DONE).exists():
            write_runs([open_packed(folder) for folder in self._folders], kept, work)
            write_atomically(work / RUNS_DONE, "", durable=True)
        runs.write_packed(
            work,
            k1=info.settings["k1"],
            b=info.settings["b"],
            progress=lambda done, of: self._tell("merge", done / max(of, 1), f"{done:,} postings"),
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
        seal_folder(work, description, [*runs.RUN_FILES, RUNS_DONE])
        self._tell("done", 1.0, f"{state.passages:,} passages")


def _passages(
    documents: SegmentedDocuments, rows: SegmentedRows, kept: np.ndarray, start: int
) -> Iterator[Passage]:
    for row in range(start, documents.count):
        if kept[row]:
            fields = rows.row(row)
            identity = fields.pop("id")
            yield Passage(identity, fields.pop("contents"), row + 1, row + 1, fields)


def write_runs(segments: Sequence[PackedFiles], kept: np.ndarray, work: Path) -> None:
    """Write a run per segment. kept: bool [rows of all segments]; the others go, and the rows behind them
    move up. Terms are numbered in the order of their first sight."""
    new_rows = np.where(kept, np.cumsum(kept) - 1, -1).astype(np.int32)
    numbers: dict[bytes, int] = {}
    begin = 0
    files = {name: (work / name).open("wb") for name in runs.RUN_FILES}
    try:
        for segment in segments:
            own_rows = new_rows[begin : begin + len(segment.lengths)]
            begin += len(own_rows)
            files[runs.RUN_LENGTHS].write(segment.lengths[own_rows >= 0].tobytes())
            terms = _terms_of(segment)
            wanted = np.flatnonzero(_left(segment, own_rows))
            for term in wanted.tolist():
                numbers.setdefault(terms[term], len(numbers))
            new = np.array([numbers[terms[term]] for term in wanted.tolist()], np.int64)
            order = np.argsort(new, kind="stable")
            postings = 0
            for part in _groups(segment.frequencies[wanted[order]]):
                own = wanted[order[part]]
                most = int(segment.frequencies[own].sum(dtype=np.int64))
                rows = np.empty(most, np.uint32)
                tfs = np.empty(most, np.uint16)
                counts = np.empty(len(own), np.uint32)
                left = unpack_terms(
                    *segment.blocks[:4], *segment.blocks[5:], own, own_rows, counts, rows, tfs
                )
                files[runs.RUN_TERMS].write(new[order[part]].astype(np.uint32).tobytes())
                files[runs.RUN_COUNTS].write(counts.data)
                files[runs.RUN_ROWS].write(rows[:left].data)
                files[runs.RUN_TFS].write(tfs[:left].data)
                postings += int(left)
            files[runs.RUN_SIZES].write(np.array([len(wanted), postings], np.uint64).tobytes())
        files[runs.RUN_VOCABULARY].write(b"".join(term + b"\n" for term in numbers))
    finally:
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()


def _terms_of(segment: PackedFiles) -> list[bytes]:
    return segment.text.tobytes().split(b"\n")[:-1]


def _left(segment: PackedFiles, new_rows: np.ndarray) -> np.ndarray:
    """Whether some passage with each term stays."""
    if (new_rows >= 0).all():
        return np.ones(len(segment.frequencies), bool)
    left = np.zeros(len(segment.frequencies), np.int64)
    terms = np.arange(len(left))
    for part in _groups(segment.frequencies):
        most = int(segment.frequencies[part].sum(dtype=np.int64))
        counts = np.empty(len(terms[part]), np.uint32)
        unpack_terms(
            *segment.blocks[:4], *segment.blocks[5:], terms[part], new_rows, counts,
            np.empty(most, np.uint32), np.empty(most, np.uint16),
        )  # fmt: skip
        left[part] = counts
    return left > 0


def _groups(frequencies: np.ndarray) -> Iterator[slice]:
    """Slices of terms with about _GROUP_POSTINGS postings each."""
    ends = np.cumsum(frequencies, dtype=np.int64)
    begin = 0
    while begin < len(ends):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + _GROUP_POSTINGS, "right")))
        yield slice(begin, end)
        begin = end
