"""The ids of the passages that an index has, asked for by the many that are to be added to it."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import numpy as np

from retriever_service.index_folder.description import IndexInfo
from retriever_service.index_folder.rows import KEYS_FILE, ROWS_FILE, hash_of
from retriever_service.index_folder.segments import SegmentedDocuments, folders_of, read_deletions


class HeldIds:
    """Those of an index of packed postings. An id of a deleted passage is none of them."""

    def __init__(self, index: Path, info: IndexInfo) -> None:
        folders = folders_of(index, info)
        self._documents = SegmentedDocuments(folders)
        self._deleted = frozenset(read_deletions(index, info)["rows"])
        self._keys = [np.asarray(np.memmap(folder / KEYS_FILE, np.uint64, "r")) for folder in folders]
        self._rows = [np.asarray(np.memmap(folder / ROWS_FILE, np.uint32, "r")) for folder in folders]

    def hashed(self, hashes: np.ndarray) -> np.ndarray:
        """Positions of the hashes (`hash_of`) that an id or url of the index has too, in rising order."""
        found = np.zeros(len(hashes), bool)
        for keys in self._keys:
            places = np.minimum(np.searchsorted(keys, hashes), len(keys) - 1)
            found |= keys[places] == hashes
        return np.flatnonzero(found)

    def __contains__(self, identity: str) -> bool:
        wanted = np.uint64(hash_of(identity))
        for keys, rows, first in zip(self._keys, self._rows, self._documents.begins, strict=False):
            begin, end = np.searchsorted(keys, wanted, "left"), np.searchsorted(keys, wanted, "right")
            for row in {first + own for own in rows[begin:end].tolist()} - self._deleted:
                if self._documents.get(row)[0] == identity:  # otherwise it is a url, or another text's hash
                    return True
        return False

    def __enter__(self) -> HeldIds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._documents.close()
