"""The passages of an index on disk, memory-mapped: any number of them, and no text held in memory.

`documents.jsonl` has one passage per line, already in the JSON form in which it is sent (`{"id",
"contents"}`, and `url` where its row has one), so that an answer is made by joining bytes.
`documents.offsets` has the byte position of each line, and the end, as little-endian uint64.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import orjson

from retriever_service.errors import IndexInvalid

TEXT_FILE = "documents.jsonl"
OFFSETS_FILE = "documents.offsets"
assert sys.byteorder == "little"


def encode_document(identity: str, contents: str, url: object = None) -> bytes:
    """The JSON form of one passage, with its url where that is a text."""
    document = {"id": identity, "contents": contents}
    return orjson.dumps(document | {"url": url} if isinstance(url, str) else document)


class Documents:
    """Random access to passages. Safe to share between threads and processes."""

    def __init__(self, text: Path, offsets: Path) -> None:
        self._offsets = _map(offsets)
        self._text = _map(text)
        self._positions = memoryview(self._offsets).cast("Q")
        self.count = len(self._positions) - 1
        if self.count < 1 or self._positions[self.count] not in (len(self._text), len(self._text) + 1):
            raise IndexInvalid(
                f"{text}: {len(self._text)} bytes do not match {offsets.name}; build the index again"
            )

    def raw(self, row: int) -> bytes:
        """JSON bytes of one passage."""
        return self._text[self._positions[row] : self._positions[row + 1] - 1]

    def get(self, row: int) -> tuple[str, str]:
        """Id and contents of one passage."""
        document = orjson.loads(self.raw(row))
        return document["id"], document["contents"]

    def close(self) -> None:
        self._positions.release()
        self._offsets.close()
        self._text.close()


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
