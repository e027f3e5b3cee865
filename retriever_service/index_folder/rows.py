"""Whole rows of a corpus on disk, memory-mapped: the fields beyond id, contents and url, and the places of
ids and urls.

`fields.blocks` has the JSON of those fields in blocks of up to 64 rows: the `uint32` sizes of the block's
text and of what follows, then the text packed by zstd, one row per line. `fields.places` has for each row a
`uint64`: where its block begins, times 256, plus its line in it. `lookup.keys` holds the sorted 64-bit hashes
of all ids and urls, `lookup.rows` the row of each. An index that lacks these files, as older ones do, serves
everything but whole rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from retriever_service.index_folder.documents import Documents

BLOCKS_FILE = "fields.blocks"
PLACES_FILE = "fields.places"
KEYS_FILE = "lookup.keys"
ROWS_FILE = "lookup.rows"
_BLOCK_ROWS = 64
_SAMPLED_ROWS = 2000
_NOWHERE = np.iinfo(np.uint64).max
"""The place of a row without other fields."""


def hash_of(text: str) -> int:
    """64 bits that depend on the text alone."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def encode_fields(fields: dict[str, Any]) -> bytes:
    """The JSON form of the fields of one row, whatever their types."""
    try:
        return orjson.dumps(fields, default=str, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # an integer beyond 64 bits
        return json.dumps(fields, default=str, ensure_ascii=False).encode()


def write_fields(rows: Sequence[dict[str, Any]], blocks: BinaryIO, places: BinaryIO, end: int) -> int:
    """Append the fields of rows to the two files, of which the first ends at `end`; returns its new end."""
    import pyarrow

    for begin in range(0, len(rows), _BLOCK_ROWS):
        lines = [encode_fields(fields) if fields else b"" for fields in rows[begin : begin + _BLOCK_ROWS]]
        if not any(lines):
            places.write(np.full(len(lines), _NOWHERE, np.uint64).tobytes())
            continue
        text = b"\n".join(lines)
        block = pyarrow.compress(text, codec="zstd", asbytes=True)
        packed = np.array([len(text), len(block)], np.uint32).tobytes() + block
        own = [end * 256 + i if line else int(_NOWHERE) for i, line in enumerate(lines)]
        places.write(np.array(own, np.uint64).tobytes())
        blocks.write(packed)
        end += len(packed)
    return end


def write_lookup(folder: Path, ids: np.ndarray, urls: np.ndarray) -> None:
    """Write the places of ids and urls. ids, urls: uint64 [rows], hashes; 0 is a row without a url."""
    with_url = np.flatnonzero(urls)
    keys = np.concatenate([ids, urls[with_url]])
    rows = np.concatenate([np.arange(len(ids)), with_url]).astype(np.uint32)
    order = np.argsort(keys, kind="stable")
    keys[order].tofile(folder / KEYS_FILE)
    rows[order].tofile(folder / ROWS_FILE)


class Rows:
    """Whole rows of an index folder. Safe to share between threads and processes."""

    _seen: tuple[list[str], bool] | None = None

    def __init__(self, folder: Path, documents: Documents) -> None:
        self._documents = documents
        self._keys = np.memmap(folder / KEYS_FILE, np.uint64, "r")
        self._rows = np.memmap(folder / ROWS_FILE, np.uint32, "r")
        self._fields: tuple[np.memmap, np.memmap] | None = None
        """The blocks and the place of each row; None where no row has other fields."""
        if (folder / BLOCKS_FILE).is_file():
            blocks = np.memmap(folder / BLOCKS_FILE, np.uint8, "r")
            self._fields = blocks, np.memmap(folder / PLACES_FILE, np.uint64, "r")

    @classmethod
    def of(cls, folder: Path, documents: Documents) -> Rows | None:
        """The rows of an index folder; None where it was built without them."""
        return cls(folder, documents) if (folder / KEYS_FILE).is_file() else None

    def find(self, key: str) -> list[int]:
        """Rows whose id or url is `key`, in the order of the corpus."""
        wanted = np.uint64(hash_of(key))
        begin = np.searchsorted(self._keys, wanted, "left")
        end = np.searchsorted(self._keys, wanted, "right")
        found = sorted(set(self._rows[begin:end].tolist()))
        return [row for row in found if key in self._names(row)]

    def whole(self, document: bytes) -> dict[str, Any]:
        """The whole row of a document as the search returned it: id and contents first."""
        found = orjson.loads(document)
        rows = self.find(found["id"])
        return found | self._fields_of(rows[0]) | found if rows else found

    def row(self, number: int) -> dict[str, Any]:
        """One whole row."""
        found = orjson.loads(self._documents.raw(number))
        return found | self._fields_of(number) | found

    def names(self) -> tuple[list[str], bool]:
        """Names of the fields that rows have, and whether all rows were looked at: of a large corpus it is
        every nth. Read once, then kept."""
        if self._seen is None:
            step = -(-self._documents.count // _SAMPLED_ROWS)
            rows = (self.row(number) for number in range(0, self._documents.count, step))
            self._seen = [*dict.fromkeys(name for row in rows for name in row)], step == 1
        return self._seen

    def _names(self, row: int) -> tuple[str, str | None]:
        document = orjson.loads(self._documents.raw(row))
        return document["id"], document.get("url")

    def _fields_of(self, row: int) -> dict[str, Any]:
        import pyarrow

        if self._fields is None:
            return {}
        blocks, places = self._fields
        place = int(places[row])
        if place == int(_NOWHERE):
            return {}
        at, line = divmod(place, 256)
        size, packed_size = blocks[at : at + 8].view(np.uint32).tolist()
        packed = blocks[at + 8 : at + 8 + packed_size].tobytes()
        text = pyarrow.decompress(packed, decompressed_size=size, codec="zstd", asbytes=True)
        return json.loads(text.split(b"\n")[line])
