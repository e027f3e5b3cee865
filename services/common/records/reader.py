"""Records of a file or folder, one after the other, with the place of each."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from services.common.errors import UserError
from services.common.printing.kinds import kind_of
from services.common.records.files import (
    DAMAGED,
    Layout,
    data_files,
    holds_rows,
    layout_of,
    no_utf8,
    open_unpacked,
)

ACCEPTED = (
    "JSON Lines, JSON (a list, or an object that holds one), CSV, TSV, Parquet or Arrow, also packed with "
    "gzip, zstd, bzip2 or xz, or a folder of these"
)
BATCH_ROWS = 4096
FIRST_ROWS = 64
"""Of a table, by which columns are taken for small."""
_BLOCK_CHARS = 1 << 16
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
"""Escapes of surrogates: half a pair alone is no text, and can't be written again."""
_BYTE = re.compile("[\udc80-\udcff]")
"""A byte that is no UTF-8, as `surrogateescape` reads it."""
_APART = re.compile(r"[\s,]*")
Wanted = Callable[[str], bool]
"""Whether a column of a Parquet file is read."""


@dataclass(slots=True)
class Record:
    """One record as its file has it: where it stands, and its fields, or what is wrong with it."""

    file: Path
    unit: str
    """What `number` counts in the file, from 1: `line` or `row`."""
    number: int
    fields: dict[str, Any] | None
    problem: str = ""
    names: list[str] | None = None
    """All columns of the file, where only some were read."""

    @property
    def place(self) -> str:
        """For messages: `FILE, line 3`."""
        return f"{self.file}, {self.unit} {self.number}"


def read_records(path: str | Path, wanted: Wanted | None = None, beside: int = 0) -> Iterator[Record]:
    """All records of a file, or of the files of a folder. `wanted` chooses columns of Parquet and Arrow; the
    others give all. beside: other columns are read too that hold no more bytes than that in a row, on
    average.

    A record that is damaged alone comes with its problem. Raises UserError where a file itself is.
    """
    for file in data_files(Path(path)):
        try:
            yield from _read_file(file, layout_of(file), wanted, beside)
        except (*DAMAGED, ValueError) as error:  # ValueErrors: of a library that has read a part
            raise UserError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None


def _read_file(file: Path, layout: Layout, wanted: Wanted | None, beside: int) -> Iterator[Record]:
    if layout.format == "parquet":
        yield from _parquet(file, wanted, beside)
    elif layout.format == "arrow":
        yield from _arrow(file, wanted, beside)
    elif layout.plain_lines:
        with open_unpacked(file) as lines:
            yield from _json_lines(file, lines)
    elif layout.format != "empty":
        # Bytes that are no text of the encoding become surrogates, so that the record that holds them can be
        # named.
        with io.TextIOWrapper(open_unpacked(file), layout.encoding, _errors(layout), newline="") as text:
            try:
                yield from _of_text(file, text, layout)
            except UnicodeDecodeError as error:
                raise UserError(f"{file}: damaged {layout.encoding} text: {error.reason}") from None


def _errors(layout: Layout) -> str:
    return "surrogateescape" if layout.encoding.startswith("utf-8") else "strict"


def _of_text(file: Path, text: TextIO, layout: Layout) -> Iterator[Record]:
    if layout.format == "table":
        yield from _table(file, text, layout.delimiter)
    elif layout.format == "jsonl":
        yield from _json_lines(file, (line.encode("utf-8", "surrogatepass") for line in text))
    else:
        yield from _json(file, text)


def _json_lines(file: Path, lines: Iterable[bytes]) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        try:
            text = line.decode()
            fields = json.loads(text)
            if _HALF_PAIR.search(text):
                json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeDecodeError:
            yield Record(file, "line", number, None, no_utf8(file))
        except (ValueError, RecursionError) as error:  # also UnicodeEncodeError
            problem: object = error
            if isinstance(error, json.JSONDecodeError):  # its own line number is that within the record
                problem = f"{error.msg} at character {error.pos + 1}"
            yield Record(file, "line", number, None, f"expected a JSON object: {problem}")
        else:
            yield _object(file, "line", number, fields)


def _object(file: Path, unit: str, number: int, fields: Any) -> Record:
    if isinstance(fields, dict):
        return Record(file, unit, number, fields)
    return Record(file, unit, number, None, f"expected a JSON object, got {kind_of(fields)}")


def _json(file: Path, text: TextIO) -> Iterator[Record]:
    """A list, read piece by piece; an object that holds a list; or objects one after the other, each over
    several lines."""
    items = _values(file, text)
    number = 0
    for value, is_row in items:
        for row in (value,) if is_row or not holds_rows(value) else _rows_in(file, value):
            number += 1
            try:
                json.dumps(row, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                # Half a pair of surrogates that an escape has written is no matter of the encoding.
                escaped = not _BYTE.match(error.object[error.start])
                problem = f"not UTF-8 text: {error.reason}" if escaped else no_utf8(file)
                yield Record(file, "row", number, None, problem)
            else:
                yield _object(file, "row", number, row)


def _rows_in(file: Path, value: dict[str, Any]) -> list[dict[str, Any]]:
    lists = {
        k: v
        for k, v in value.items()
        if isinstance(v, list) and v and all(isinstance(one, dict) for one in v)
    }
    if len(lists) > 1:
        raise UserError(
            f"{file}: holds several lists of rows ({', '.join(lists)}); expected one list in a file"
        )
    return next(iter(lists.values()))


def _values(file: Path, text: TextIO) -> Iterator[tuple[Any, bool]]:
    """The items of a list, or the values of a stream, each with whether it is such an item, and so a row. No
    more of the text is in memory than the largest of them."""
    decoder = json.JSONDecoder()
    buffer = text.read(_BLOCK_CHARS).removeprefix("\ufeff")
    at = len(buffer) - len(buffer.lstrip())
    in_list = buffer[at : at + 1] == "["
    at += in_list
    block = _BLOCK_CHARS
    more = True
    while True:
        if apart := _APART.match(buffer, at):
            at = apart.end()
        ended = in_list and buffer[at : at + 1] == "]"
        if ended:
            if buffer[at + 1 :].strip() or text.read(_BLOCK_CHARS).strip():
                raise UserError(f"{file}: damaged JSON: something stands behind the end of its list")
            return
        problem: Exception | None = None
        try:
            value, end = decoder.raw_decode(buffer, at)
        except (ValueError, RecursionError) as error:
            # It may be cut off where the block ends: judged once more of the text was read.
            value = None
            end = len(buffer)
            problem = error
        if end < len(buffer) or not more:
            if problem is None:
                yield value, in_list
                at = end
                continue
            if at == len(buffer) and not in_list:
                return
            what = "it ends in the middle" if at == len(buffer) else str(problem)
            raise UserError(f"{file}: damaged JSON: {what}")
        read = text.read(block)
        more = len(read) > 0
        buffer = buffer[at:] + read
        at = 0
        block = min(2 * block, 1 << 26) if problem is not None else _BLOCK_CHARS


class _Lines:
    """Lines of a table. `ended` while a row is read: it asked for more, as one with an open quote does."""

    def __init__(self, text: TextIO) -> None:
        self.text = text
        self.ended = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self.text.readline()
        if not line:
            self.ended = True
            raise StopIteration
        return line


def _table(file: Path, text: TextIO, delimiter: str) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)
    lines = _Lines(text)
    rows = csv.reader(lines, delimiter=delimiter)
    names: list[str] | None = None
    while True:
        number = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise UserError(f"{file}, line {number}: damaged table: {error}") from None
        if row is None:
            return
        if not any(cell.strip() for cell in row):
            continue
        if names is None:
            if _BYTE.search("".join(row)):
                raise UserError(f"{file}, line {number}: {no_utf8(file)}")
            names = [name.strip().removeprefix("\ufeff") for name in row]
            _check_names(file, names)
            continue
        if lines.ended:
            yield Record(file, "line", number, None, "a quote that begins here is never closed")
            return
        if len(row) != len(names):
            yield Record(
                file,
                "line",
                number,
                None,
                f"{len(row)} columns, the header has {len(names)} ({', '.join(names)})",
            )
            continue
        try:
            "".join(row).encode()
        except UnicodeEncodeError:
            yield Record(file, "line", number, None, no_utf8(file))
            continue
        yield Record(file, "line", number, dict(zip(names, row, strict=True)))


@contextmanager
def _readable(file: Path, kind: str) -> Iterator[None]:
    """Around the reading of a binary file: damage is a ValueError that names the file."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{file}: not a readable {kind} file: {' '.join(str(error).split())}") from None


def _parquet(file: Path, wanted: Wanted | None, beside: int) -> Iterator[Record]:
    from pyarrow import parquet

    with _readable(file, "parquet"):
        with parquet.ParquetFile(file) as table:
            small = _small_in(table.metadata, beside) if wanted and beside else set()
            if small:  # a text that all rows share stands once in the file, and is read for each
                first = next(table.iter_batches(batch_size=FIRST_ROWS, columns=[*small]), None)
                small = _small_of(first, beside) if first is not None else set()
            columns = _chosen(table.schema_arrow.names, wanted, small)
            names = table.schema_arrow.names
            yield from _numbered(file, names, table.iter_batches(batch_size=BATCH_ROWS, columns=columns))


def _small_in(metadata: Any, most: int) -> set[str]:
    """Columns of a Parquet file of at most so many bytes in a row, by its own sums."""
    sums: dict[str, int] = {}
    names = set(metadata.schema.to_arrow_schema().names)
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for part in map(group.column, range(group.num_columns)):  # a struct has one for each of its fields
            path = part.path_in_schema
            name = path if path in names else path.partition(".")[0]
            sums[name] = sums.get(name, 0) + part.total_uncompressed_size
    return {name for name, held in sums.items() if held <= most * metadata.num_rows}


def _small_of(batch: Any, most: int) -> set[str]:
    """Columns of some rows that hold at most so many bytes in a row."""
    columns = zip(batch.schema.names, batch.columns, strict=True)
    return {name for name, column in columns if column.nbytes <= most * batch.num_rows}


def _arrow(file: Path, wanted: Wanted | None, beside: int) -> Iterator[Record]:
    """What `datasets` saves to disk is a stream; Feather is a file."""
    import pyarrow
    from pyarrow import ipc

    with _readable(file, "Arrow"):
        with pyarrow.memory_map(str(file)) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            opened = ipc.open_file(source) if is_file else ipc.open_stream(source)
            batches = (opened.get_batch(i) for i in range(opened.num_record_batches)) if is_file else opened
            small: set[str] = set()
            if wanted and beside and (first := next(batches := iter(batches), None)) is not None:
                small = _small_of(first, beside)
                batches = chain([first], batches)
            columns = _chosen(opened.schema.names, wanted, small)
            chosen = (batch if columns is None else batch.select(columns) for batch in batches)
            yield from _numbered(file, opened.schema.names, chosen)


def _chosen(names: list[str], wanted: Wanted | None, small: set[str]) -> list[str] | None:
    """The columns to read, small ones beside those that are wanted; all where none is wanted, so that a
    message can name them."""
    if wanted is None or not any(map(wanted, names)):
        return None
    return [name for name in names if wanted(name) or name in small]


def _check_names(file: Path, names: list[str]) -> None:
    """Raises UserError where one of two columns of a name would be lost."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{file}: two columns are called {twice!r}")


def _numbered(file: Path, names: list[str], batches: Iterable[Any]) -> Iterator[Record]:
    _check_names(file, names)
    number = 0
    for batch in batches:
        for fields in _rows(batch):
            number += 1
            yield Record(file, "row", number, fields, names=names)


def _rows(batch: Any) -> list[dict[str, Any]]:
    """The rows of a batch. A value that Python has no form for, such as a date of the year 20,000 or a time
    in a zone that is not known here, stays Arrow's: a column that nobody asks for must not refuse the
    file."""
    import pyarrow

    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        raise
    except (OverflowError, ValueError, pyarrow.ArrowException):
        columns = [[_value(cell) for cell in column] for column in batch.columns]
        return [dict(zip(batch.schema.names, cells, strict=True)) for cells in zip(*columns, strict=True)]


def _value(cell: Any) -> Any:
    import pyarrow

    try:
        return cell.as_py()
    except UnicodeDecodeError:
        raise
    except (OverflowError, ValueError, pyarrow.ArrowException):
        return cell
