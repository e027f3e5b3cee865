"""An index in segments: its own passages, then those that were added, less those that are deleted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypedDict

import orjson

from retriever_service.errors import damaged
from retriever_service.index_folder.description import IndexInfo
from retriever_service.index_folder.documents import OFFSETS_FILE, TEXT_FILE, Documents
from retriever_service.index_folder.rows import Rows


class Deletions(TypedDict):
    """The content of a file of deletions, as JSON."""

    rows: list[int]
    """Ascending; rows of the index as a whole."""
    tokens: int
    """Terms of these passages, with repeats."""
    frequencies: dict[str, int]
    """How many of these passages have each term."""


def folders_of(folder: Path, info: IndexInfo) -> list[Path]:
    """The folders of the segments, in the order of their rows."""
    return [folder, *(folder / segment for segment in info.segments)]


def read_deletions(folder: Path, info: IndexInfo) -> Deletions:
    """What is deleted. Raises IndexInvalid."""
    if not info.deletions:
        return Deletions(rows=[], tokens=0, frequencies={})
    path = folder / info.deletions
    with damaged(f"{path}: damaged"):
        found = orjson.loads(path.read_bytes())
        return Deletions(rows=found["rows"], tokens=found["tokens"], frequencies=found["frequencies"])


class SegmentedDocuments(Documents):
    """The passages of several folders as one: row numbers go on from folder to folder."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.parts = [Documents(folder / TEXT_FILE, folder / OFFSETS_FILE) for folder in folders]
        self.begins = [0, *accumulate(part.count for part in self.parts)]
        self.count = self.begins[-1]

    def place(self, row: int) -> tuple[int, int]:
        """(segment, row in it) of a row."""
        part = bisect_right(self.begins, row) - 1
        return part, row - self.begins[part]

    def raw(self, row: int) -> bytes:
        """As Documents."""
        part, own = self.place(row)
        return self.parts[part].raw(own)

    def close(self) -> None:
        """As Documents."""
        for part in self.parts:
            part.close()


class SegmentedRows(Rows):
    """The whole rows of several folders as one; deleted ones are not found."""

    def __init__(
        self, folders: Sequence[Path], documents: SegmentedDocuments, deleted: Sequence[int]
    ) -> None:
        self._documents = documents
        self.parts = [Rows(folder, part) for folder, part in zip(folders, documents.parts, strict=True)]
        self._segmented = documents
        self._deleted = frozenset(deleted)

    def find(self, key: str) -> list[int]:
        """As Rows."""
        begins = self._segmented.begins
        found = (
            begin + row for begin, part in zip(begins, self.parts, strict=False) for row in part.find(key)
        )
        return [row for row in found if row not in self._deleted]

    def _fields_of(self, row: int) -> dict[str, Any]:
        part, own = self._segmented.place(row)
        return self.parts[part]._fields_of(own)
