"""Reading a corpus: JSONL, gzipped or not, one passage a line: `{"id": "0", "contents": "\\"Title\\"\\ntext"}`, or Parquet with those columns."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from retriever_service.errors import CorpusError

EXPECTED = '{"id": "0", "contents": "\\"Title\\"\\ntext"}'
_BLOCK, _SAMPLE = 4 << 20, 8 << 20


@dataclass
class Skipped:
    """Lines that were left out (`skip_bad`): how many, and the first few reasons."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, reason: str) -> None:
        self.count += 1
        if len(self.reasons) < 3:
            self.reasons.append(reason)


@dataclass(frozen=True)
class Passage:
    """One passage, and where reading goes on after it."""

    id: str
    contents: str
    line: int
    """Line number in the file, from 1."""
    end: int
    """Where reading goes on after it: a byte position (uncompressed), or in Parquet the number of rows."""


def parse_passage(raw: bytes) -> tuple[str, str]:
    """Id and contents of one line. Also takes `title` and `text` in place of `contents`. Raises ValueError saying what is wrong."""
    try:
        row = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{type(row).__name__} instead of an object")
    return passage_of(row)


def passage_of(row: dict) -> tuple[str, str]:
    """Id and contents of one row, as `parse_passage`."""
    identity, contents = row.get("id"), row.get("contents")
    if isinstance(identity, int) and not isinstance(identity, bool):
        identity = str(identity)
    if not isinstance(identity, str) or not identity:
        raise ValueError('no "id" (a string that is not empty, or an integer)')
    if contents is None and isinstance(row.get("text"), str):
        title = row.get("title")
        contents = f'"{title}"\n{row["text"]}' if isinstance(title, str) else row["text"]
    if not isinstance(contents, str):
        raise ValueError('no "contents" (a string)')
    return identity, contents


def open_corpus(path: Path):
    """The uncompressed bytes of a corpus file."""
    if not path.is_file():
        raise CorpusError(f"corpus {path}: no such file")
    with path.open("rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if gzipped else path.open("rb")


def read_corpus(
    path: str | Path, *, skip_bad: bool = False, skipped: Skipped | None = None, line: int = 0, start: int = 0
) -> Iterator[Passage]:
    """Passages of a corpus from byte `start`, which lies behind `line` lines. Blank lines are passed over.

    Raises CorpusError at the first malformed line, or counts it in `skipped` where `skip_bad` is set.
    """
    path, skipped = Path(path), skipped if skipped is not None else Skipped()
    if is_parquet(path):
        yield from _read_parquet(path, skip_bad, skipped, start)
        return
    with open_corpus(path) as file:
        if start:
            file.seek(start)
        position = start
        try:
            for raw in file:
                line += 1
                position += len(raw)
                text = raw.removeprefix(b"\xef\xbb\xbf").strip() if line == 1 else raw.strip()
                if not text:
                    continue
                try:
                    identity, contents = parse_passage(text)
                except ValueError as error:
                    _bad(f"{path}:{line}: {error}; expected {EXPECTED}", skip_bad, skipped)
                    continue
                yield Passage(identity, contents, line, position)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise CorpusError(f"{path}: damaged gzip file after line {line}: {error}") from None


def is_parquet(path: Path) -> bool:
    """Whether a file starts as Parquet does."""
    if not path.is_file():
        raise CorpusError(f"corpus {path}: no such file")
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def extent(path: Path) -> int:
    """About the `end` of the last passage, for progress: exact but for gzip, where it is estimated from its start."""
    text, passages = estimate(path)
    return passages if is_parquet(path) else text


def estimate(path: Path) -> tuple[int, int]:
    """(bytes of uncompressed text, passages), from the first 8 MiB of text as if all of it were such; in Parquet what the file says."""
    if is_parquet(path):
        metadata = _open_parquet(path).metadata
        groups = (metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
        return max(1, sum(groups)), max(1, metadata.num_rows)
    size = path.stat().st_size
    with path.open("rb") as raw:
        gzipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        try:
            head = (gzip.GzipFile(fileobj=raw) if gzipped else raw).read(_SAMPLE)
        except (EOFError, gzip.BadGzipFile, zlib.error):  # the scan says where it is damaged
            return 3 * size, max(1, size // 200)
        text = (
            size
            if not gzipped
            else len(head)
            if len(head) < _SAMPLE
            else len(head) * size // max(raw.tell(), 1)
        )
    return max(1, text), max(1, round(text * head.count(b"\n") / max(len(head), 1)))


def _open_parquet(path: Path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise CorpusError(f"{path}: damaged Parquet file: {' '.join(str(error).split())}") from None


def _read_parquet(path: Path, skip_bad: bool, skipped: Skipped, start: int) -> Iterator[Passage]:
    file = _open_parquet(path)
    columns = [name for name in ("id", "contents", "title", "text") if name in file.schema_arrow.names]
    if "id" not in columns or not {"contents", "text"} & set(columns):
        raise CorpusError(
            f"{path}: columns {', '.join(file.schema_arrow.names)}; expected id and contents (or title and text)"
        )
    row = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if row + rows <= start:
            row += rows
            continue
        for rows_read in _batches(path, file, group, columns):
            for values in rows_read:
                row += 1
                if row <= start:
                    continue
                try:
                    identity, contents = passage_of(values)
                except ValueError as error:
                    _bad(f"{path}: row {row}: {error}; expected {EXPECTED}", skip_bad, skipped)
                    continue
                yield Passage(identity, contents, row, row)


def _batches(path: Path, file, group: int, columns: list[str]) -> Iterator[list[dict]]:
    import pyarrow as pa

    try:
        for batch in file.iter_batches(4096, row_groups=[group], columns=columns):
            yield batch.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorpusError(
            f"{path}: damaged Parquet file, row group {group + 1}: {' '.join(str(error).split())}"
        ) from None


def _bad(reason: str, skip_bad: bool, skipped: Skipped) -> None:
    if not skip_bad:
        raise CorpusError(reason + "; --skip-bad leaves such lines out")
    skipped.add(reason)


def checksum(path: str | Path, progress: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file, as `sha256sum` prints it. `progress` is told the bytes done."""
    path = Path(path)
    if not path.is_file():
        raise CorpusError(f"corpus {path}: no such file")
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            done += len(block)
            if progress:
                progress(done)
    return digest.hexdigest()
