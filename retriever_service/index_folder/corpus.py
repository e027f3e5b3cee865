"""Reading a corpus of any layout (`services.common.records`), one passage per record; JSON Lines by their
byte positions."""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retriever_service.index_folder.keys import NO_KEYS, CorpusKeys
from retriever_service.index_folder.passages import (
    COLUMNS_EXPECTED,
    EXPECTED,
    NAMED_BY,
    Row,
    has_id,
    named_by_place,
    parse_row,
    row_of,
)
from retriever_service.index_folder.rows import hash_of
from services.common.counting import counted, malformed
from services.common.errors import UserError
from services.common.records import Record, data_files, layout_of, no_utf8, open_unpacked, read_records
from services.common.records.files import DAMAGED

SKIP_BAD = "--skip-bad (of a run: retriever.skip_bad)"
COUNTED = 100_000
"""Rows behind a malformed one among which others are counted: in about a second."""
_BLOCK = 4 << 20
_SAMPLE = 8 << 20
_ROW_BYTES_GUESSED = 500
"""Bytes assumed per passage where a sample does not show where passages end."""


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
    """Line or row in the file, from 1; in a folder of several files the number of the record."""
    end: int
    """Where reading goes on after it: in JSON Lines a byte position (unpacked), otherwise the number of
    records."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The row's other fields."""
    placed: bool = False
    """Whether it has no id in a corpus with ids, and is named by its place."""


def corpus_files(path: str | Path) -> list[Path]:
    """The files of a corpus. Raises UserError where there is none."""
    return data_files(Path(path), "a corpus")


def is_one_file_of_lines(files: Sequence[Path]) -> bool:
    """Whether a corpus is read line by line, from a byte position on, and counted by its lines."""
    return len(files) == 1 and layout_of(files[0]).plain_lines


def read_corpus(
    path: str | Path,
    *,
    skip_bad: bool = False,
    skipped: Skipped | None = None,
    line: int = 0,
    start: int = 0,
    keys: CorpusKeys = NO_KEYS,
    placing: bool = True,
) -> Iterator[Passage]:
    """Passages of a corpus from `start` (as `Passage.end`), which lies behind `line` lines. Blank lines are
    passed over.

    Where the first row has no column for an id, such rows have their number, from 0; where it has one, the
    others are named by their place, or malformed without `placing`. Raises UserError where
    it has no column that `keys` names, and at the first malformed line, saying how many more there are; or
    counts that in `skipped` where `skip_bad` is set.
    """
    skipped = skipped if skipped is not None else Skipped()
    files = corpus_files(path)
    keys.check(path)
    places = Places(are_numbered(path, keys), placing)
    if is_one_file_of_lines(files):
        yield from _read_lines(files[0], skip_bad, skipped, line, start, places, keys)
    else:
        yield from _read_records(Path(path), len(files) == 1, skip_bad, skipped, start, places, keys)


@dataclass(frozen=True)
class Places:
    """How rows without an id are named."""

    numbered: bool
    """The corpus has no ids at all."""
    placing: bool = True
    """Otherwise such a row of a corpus with ids is malformed: of an addition, its place would be no name."""

    def of(self, number: int) -> str | None:
        """The id of the row of this number, from 0, where it has none; None refuses it."""
        return named_by_place(number, self.numbered) if self.numbered or self.placing else None


def are_numbered(path: str | Path, keys: CorpusKeys = NO_KEYS) -> bool:
    """Whether the rows of a corpus have their numbers as ids: the first one has no column for an id. Raises
    UserError."""
    first = next((record.fields for record in read_records(path) if record.fields is not None), None)
    return first is not None and not has_id(keys.applied(first))


def _read_lines(
    path: Path, skip_bad: bool, skipped: Skipped, line: int, start: int, places: Places, keys: CorpusKeys
) -> Iterator[Passage]:
    with open_unpacked(path) as file:
        position = 0
        while position < start:  # not every unpacked file can seek
            position += len(file.read(min(_BLOCK, start - position)))
        try:
            for raw in file:
                line += 1
                position += len(raw)
                text = raw.removeprefix(b"\xef\xbb\xbf").strip() if line == 1 else raw.strip()
                if not text:
                    continue
                try:
                    row = parse_row(text, places.of(line - 1), keys)
                except ValueError as error:
                    told = functools.partial(_left_out, path, keys, line, position, places.placing)
                    reason = _reason(path, text, error)
                    expected = "" if keys else EXPECTED
                    _bad(f"{path}, line {line}", reason, expected, skip_bad, skipped, told)
                    continue
                placed = row.placed and not places.numbered
                yield Passage(row.id, row.contents, line, position, row.fields, placed)
        except DAMAGED as error:
            packing = layout_of(path).packing
            raise UserError(f"{path}: damaged {packing} file after line {line}: {error}") from None


def _read_records(
    path: Path,
    alone: bool,
    skip_bad: bool,
    skipped: Skipped,
    start: int,
    places: Places,
    keys: CorpusKeys,
) -> Iterator[Passage]:
    is_json = functools.cache(_is_json)
    for number, record in enumerate(read_records(path), 1):
        if number <= start:
            continue
        try:
            row = _row(record, places.of(number - 1), keys)
        except ValueError as error:
            told = functools.partial(_left_out, path, keys, number, number, places.placing)
            expected = "" if keys else EXPECTED if is_json(record.file) else COLUMNS_EXPECTED
            _bad(record.place, str(error), expected, skip_bad, skipped, told)
            continue
        placed = row.placed and not places.numbered
        at = record.number if alone else number
        yield Passage(row.id, row.contents, at, number, row.fields, placed)


def _is_json(file: Path) -> bool:
    return layout_of(file).format in ("json", "jsonl")


def _row(record: Record, place: str | None, keys: CorpusKeys) -> Row:
    if record.fields is None:
        raise ValueError(record.problem)
    return row_of(keys.applied(record.fields), place, keys.given)


def unit_of(path: str | Path) -> str:
    """What `Passage.line` counts in a corpus: `line`, or `row` where the file has no lines or there are
    several."""
    files = corpus_files(path)
    first = next(read_records(files[0]), None) if len(files) == 1 else None
    return first.unit if first is not None else "row"


def extent(path: Path) -> int:
    """About the `end` of the last passage, for progress: exact for plain JSON Lines and Parquet."""
    text, passages = estimate(path)
    files = corpus_files(path)
    return text if is_one_file_of_lines(files) else passages


def estimate(path: Path) -> tuple[int, int]:
    """(bytes of unpacked text, passages), by the first 8 MiB of text of each file as if all of it were such;
    of Parquet what it says."""
    sizes = [_estimate_file(file) for file in corpus_files(path)]
    return sum(text for text, _ in sizes), sum(passages for _, passages in sizes)


def _estimate_file(path: Path) -> tuple[int, int]:
    kind = layout_of(path)
    size = path.stat().st_size
    if kind.format == "parquet":
        return _estimate_parquet(path)
    if kind.format == "arrow":
        return max(1, size), max(1, size // _ROW_BYTES_GUESSED)
    with path.open("rb") as packed, open_unpacked(path) as file:
        try:
            head = file.read(_SAMPLE)
        except DAMAGED:  # the scan says where it is damaged
            return 3 * size, max(1, size // 200)
        text = size if not kind.packing else len(head)
        if kind.packing and len(head) == _SAMPLE:
            text = len(head) * size // max(_read_of(file, packed, size), 1)
    ends = head.count(b"\n") if kind.format != "json" else len(head) // _ROW_BYTES_GUESSED
    return max(1, text), max(1, round(text * ends / max(len(head), 1)))


def _read_of(file: Any, packed: Any, size: int) -> int:
    """Bytes of the packed file that lie behind what was read; a quarter of the text where the unpacker does
    not say."""
    inner = getattr(file, "fileobj", None) or getattr(file, "_fp", None)
    return inner.tell() if inner is not None else min(size, _SAMPLE // 4)


def _estimate_parquet(path: Path) -> tuple[int, int]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.ParquetFile(path).metadata
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: damaged Parquet file: {' '.join(str(error).split())}") from None
    groups = (metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return max(1, sum(groups)), max(1, metadata.num_rows)


def _reason(path: Path, line: bytes, error: ValueError) -> str:
    """What is wrong with a line of JSON."""
    try:
        line.decode()
    except UnicodeDecodeError:
        return no_utf8(path)
    return str(error)


def _bad(
    place: str,
    reason: str,
    expected: str,
    skip_bad: bool,
    skipped: Skipped,
    left_out: Callable[[], str],
) -> None:
    """Raises UserError, or counts the line. Of a text in another encoding, or with columns of other names, it
    is the file that is mended or described: to leave its lines out would lose good passages. expected: a row
    in the layout of its file; empty where its columns have other names. left_out: as of `_left_out`."""
    of_the_file = reason.startswith("not UTF-8 text; ") or reason.endswith(NAMED_BY)
    line = f"{place}: {reason}" if of_the_file or not expected else f"{place}: {reason}; expected {expected}"
    if not skip_bad:
        raise UserError(line if of_the_file else f"{line}; {left_out()}")
    skipped.add(line)


class _Enough(Exception):
    """So many rows were read as are counted."""


class _Counting(Skipped):
    """Counts the rows of a corpus, of which some are malformed. Raises _Enough past the most."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.ids = array("Q")

    @property
    def rows(self) -> int:
        return self.count + len(self.ids)

    def add(self, reason: str) -> None:
        super().add(reason)
        self.stop()

    def stop(self) -> None:
        if self.rows >= self.most:
            raise _Enough


def _left_out(path: Path, keys: CorpusKeys, line: int, end: int, placing: bool) -> str:
    """How many rows a build would leave out, for the line about the first of them, which ends at `end`
    (`Passage.end`); COUNTED rows behind it are looked at. Where it comes later than that, the rows before it
    are not read again, and repeated ids not counted."""
    whole, again = True, line <= COUNTED
    found = _Counting(line + COUNTED if again else COUNTED)
    where: dict[str, Any] = {} if again else {"line": line, "start": end}
    try:
        for passage in read_corpus(path, skip_bad=True, skipped=found, keys=keys, placing=placing, **where):
            found.ids.append(hash_of(passage.id))
            found.stop()
    except _Enough:
        whole = False
    except UserError:  # of the file itself, which is told once these rows are mended
        return f"{SKIP_BAD} leaves such rows out"
    bad, rows = (found.count, found.rows) if again else (found.count + 1, found.rows + line)
    repeated = len(found.ids) - len(set(found.ids)) if again else 0
    told = malformed(bad, rows, whole=whole)
    if whole and not found.ids and again:  # nothing would be left
        return told
    if repeated:
        told += f", and {counted(repeated, 'other has', 'others have')} the id of an earlier one"
    out = (
        "such rows" if not (whole and again) else "it" if bad + repeated == 1 else f"these {bad + repeated:,}"
    )
    return f"{told}: {SKIP_BAD} leaves {out} out"


def corpus_bytes(path: str | Path) -> int:
    """Size on disk of the files of a corpus; 0 where there is none."""
    path = Path(path)
    return sum(file.stat().st_size for file in corpus_files(path)) if path.exists() else 0


def checksum(path: str | Path, progress: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file, as `sha256sum` prints it; of a folder, of the names and checksums of its files.
    `progress` is told the bytes done."""
    path = Path(path)
    done = 0
    files = corpus_files(path)
    digests: dict[str, str] = {}
    for part in files:
        digest = hashlib.sha256()
        with part.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                done += len(block)
                if progress:
                    progress(done)
        digests[str(part.relative_to(path))] = digest.hexdigest()
    if path.is_file():
        return digests["."]
    return hashlib.sha256(
        "".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode()
    ).hexdigest()
