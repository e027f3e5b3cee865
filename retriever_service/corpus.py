"""Reading a corpus: JSONL, gzipped or not, one passage a line: `{"id": "0", "contents": "\\"Title\\"\\ntext"}`."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from .errors import CorpusError

EXPECTED = '{"id": "0", "contents": "\\"Title\\"\\ntext"}'
_BLOCK = 4 << 20


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
    """Byte position (uncompressed) after the line."""


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
                    reason = f"{path}:{line}: {error}; expected {EXPECTED}"
                    if not skip_bad:
                        raise CorpusError(reason + "; --skip-bad leaves such lines out") from None
                    skipped.add(reason)
                    continue
                yield Passage(identity, contents, line, position)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise CorpusError(f"{path}: damaged gzip file after line {line}: {error}") from None


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
