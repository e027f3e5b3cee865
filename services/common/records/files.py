"""The files of a path, unpacked, and the layout that their first bytes show."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import shlex
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

from services.common.errors import UserError
from services.common.names import near_path
from services.common.records.columns import CONTENTS, QUESTION, plain_name

Format = Literal["parquet", "arrow", "jsonl", "json", "table", "empty"]
Packing = Literal["", "gzip", "zstd", "bzip2", "xz"]

HEAD_BYTES = 1 << 20
"""What is looked at to tell a layout."""
DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError)
"""What the unpackers raise in the middle of a file."""
_MAGIC: dict[bytes, Packing] = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
}
_UNPACKED_BY = {"gzip": "gzip -dc", "zstd": "zstd -dc", "bzip2": "bzip2 -dc", "xz": "xz -dc"}
_MARKS = (
    (b"\xef\xbb\xbf", "utf-8-sig"),
    (b"\xff\xfe\0\0", "utf-32"),
    (b"\0\0\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_ZEROS: dict[tuple[bool, ...], str] = {
    (False, True, False, True): "utf-16-le",
    (True, False, True, False): "utf-16-be",
    (False, True, True, True): "utf-32-le",
    (True, True, True, False): "utf-32-be",
}
"""Encodings by which of the first four bytes are 0, where two characters of ASCII come first."""
NO_JSON = object()
_NO_SIGN = "\x1f"
_LONGEST_NAME = 60
"""Characters of a line that may be the name of a column."""
_AS_CSV = "save its sheet as CSV (in UTF-8) and give that file"
_ARROW_STREAM = b"\xff\xff\xff\xff"
_OF_A_ROW = {*QUESTION, *CONTENTS, "prompt", "messages", "conversations", "id", "_id"}
"""Columns that only a row has; the turns of a conversation are a list of objects, and no rows."""
DOCUMENTS = {".md", ".markdown", ".rst", ".text", ".txt"}
"""Endings of documents, which hold no rows."""
_BESIDE = DOCUMENTS | {
    ".py",
    ".sh",
    ".yaml",
    ".yml",
    ".toml",
    ".lock",
    ".html",
    ".pdf",
    ".png",
    ".jpg",
    ".svg",
}
"""Endings of what lies beside data in a folder."""
_ABOUT = {
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "license",
    "readme",
    "makefile",
}
"""Names of files that say something of the data."""


@dataclass(frozen=True)
class Layout:
    """How a file holds its records."""

    format: Format
    packing: Packing = ""
    encoding: str = "utf-8"
    delimiter: str = ""
    """Of a table: a comma, a tab or a semicolon; of one column a sign that no text has."""

    @property
    def plain_lines(self) -> bool:
        """Whether it is JSON Lines in UTF-8, packed or not: one record per line, at a byte position."""
        return self.format == "jsonl" and self.encoding in ("utf-8", "utf-8-sig")


def data_files(path: Path, expected: str = "") -> list[Path]:
    """The file itself, or the data files below a folder, by name. Raises UserError where there is none, which
    says what is expected."""
    expected = f"; expected {expected}" if expected else ""
    if path.is_file():
        return [path]
    refuse_pipe(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder{near_path(path) or expected}")
    found = [p for p in sorted(path.rglob("*")) if p.is_file() and holds_data(p.relative_to(path))]
    if not found:
        documents = any(p.suffix.lower() in DOCUMENTS for p in path.rglob("*"))
        advice = "; `unspiral data passages` makes a corpus of its documents" if documents else ""
        raise UserError(f"{path}: a folder without data files{advice}{expected}")
    return found


def refuse_pipe(path: Path) -> None:
    """Raises UserError for what can be read once only: `/dev/stdin`, `-` and `<(COMMAND)` of a shell."""
    if str(path) == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
        raise UserError(
            f"{path}: a pipe or a device, which can be read once; data are read more than once, so write "
            "them to a file first"
        )


def holds_data(inside: Path) -> bool:
    """Whether a file may hold data, by its path inside the folder that was given."""
    if any(part.startswith((".", "_")) for part in inside.parts):
        return False
    return inside.suffix.lower() not in _BESIDE and inside.name.lower() not in _ABOUT


def packing_of(head: bytes) -> Packing:
    """How a file is packed, by its first bytes."""
    return next((packing for magic, packing in _MAGIC.items() if head.startswith(magic)), "")


def open_unpacked(path: Path) -> BinaryIO:
    """The file's bytes, unpacked."""
    with path.open("rb") as file:
        packing = packing_of(file.read(8))
    # The unpackers of the standard library have all methods of a BinaryIO, and do not say so.
    if packing == "gzip":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if packing == "bzip2":
        return cast(BinaryIO, bz2.open(path, "rb"))
    if packing == "xz":
        return cast(BinaryIO, lzma.open(path, "rb"))
    if packing == "zstd":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return path.open("rb")


def no_utf8(path: Path) -> str:
    """What is wrong with a text that is no UTF-8, and the command that mends its file."""
    with path.open("rb") as file:
        packing = packing_of(file.read(8))
    read = f"{_UNPACKED_BY[packing]} {shlex.quote(str(path))} | " if packing else ""
    name = "" if packing else f" {shlex.quote(str(path))}"
    return (
        f"not UTF-8 text; save the file as UTF-8, such as by `{read}iconv -f latin1 -t utf-8{name} > NEW` "
        "(-f CP1252 if it is Excel's)"
    )


def layout_of(path: Path) -> Layout:
    """The layout of one file. Raises UserError, with what it begins with, where it is none that is read."""
    with path.open("rb") as file:
        packing = packing_of(file.read(8))
    try:
        with open_unpacked(path) as file:
            head = file.read(HEAD_BYTES)
    except DAMAGED as error:
        what = f"damaged {packing} file" if packing else "cannot be read"
        raise UserError(f"{path}: {what}: {error}") from None
    if head.startswith((b"PAR1", b"ARROW1", _ARROW_STREAM)):
        if packing:
            raise UserError(f"{path}: Parquet or Arrow packed with {packing}; unpack it")
        return Layout("parquet" if head.startswith(b"PAR1") else "arrow")
    if foreign := _foreign(path, head):
        raise UserError(f"{path}: {foreign}")
    encoding = encoding_of(head)
    if encoding == "utf-8" and _is_binary(head[:4096]):
        raise UserError(f"{path}: binary, and neither Parquet (it begins with PAR1) nor Arrow")
    text = head.decode(encoding, "replace").lstrip("\ufeff").lstrip()
    if not text:
        return Layout("empty", packing, encoding)
    whole = len(head) < HEAD_BYTES
    if text[0] == "[":
        return Layout("json" if _is_one_list(text) else "jsonl", packing, encoding)
    if text[0] == "{":
        return Layout("json" if _is_one_document(text, whole) else "jsonl", packing, encoding)
    if path.suffix.lower() in _BESIDE - DOCUMENTS:
        raise UserError(
            f"{path}: {path.suffix} files hold no rows; expected JSON Lines, JSON, CSV, TSV, Parquet or Arrow"
        )
    delimiter = _delimiter(text) or _of_one_column(text)
    if not delimiter:
        shown = text.splitlines()[0]
        told = f"{path}: neither JSON, CSV, TSV, Parquet nor Arrow: it begins with {shown[:40]!r}"
        if len(shown) <= _LONGEST_NAME:
            told += "; a table of one column, one text a line, is read where its first line is `contents`"
        raise UserError(told)
    return Layout("table", packing, encoding, delimiter)


def encoding_of(head: bytes) -> str:
    """By the byte order mark; without one by the zeros among the first four bytes, which stand for two
    characters of ASCII, as JSON and the header of a table begin; otherwise UTF-8."""
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding
    return _ZEROS.get(tuple(byte == 0 for byte in head[:4]), "utf-8")


def _is_binary(head: bytes) -> bool:
    """Whether one byte of twenty is a control character that no text has."""
    return 20 * sum(byte < 9 or 13 < byte < 32 for byte in head) > len(head)


def _is_one_list(text: str) -> bool:
    """Whether text that begins with `[` is one list of rows; otherwise each line is a list, which no row
    is."""
    first, *others = text.split("\n")
    return json_value(first) is NO_JSON or not any(line.strip() for line in others)


def _is_one_document(text: str, whole: bool) -> bool:
    """Whether text that begins with `{` is one JSON document over several lines, or a line that holds all
    rows, and not a row per line."""
    lines = text.split("\n")
    row = json_value(lines[0])
    if row is NO_JSON:
        if not any(line.strip() for line in lines[1:]):
            return not whole  # a line longer than what was looked at: of one document, unless it is damaged
        return _begins_as_document(text)
    return len([line for line in lines if line.strip()]) == 1 and whole and holds_rows(row)


def _begins_as_document(text: str) -> bool:
    """Whether the first value ends beyond its first line, or beyond what was looked at: a damaged line in a
    file of lines does neither."""
    first = text.find("\n")
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError) as error:
        return getattr(error, "pos", 0) > first and not any(map(_is_object, text.split("\n")[1:20]))
    return end > first


def _is_object(line: str) -> bool:
    return isinstance(json_value(line), dict)


def json_value(text: str | bytes, *, strict: bool = True) -> object:
    """The JSON value of a text; NO_JSON for what is none. strict: control characters inside strings
    are refused, as JSON has it."""
    try:
        return json.loads(text, strict=strict)
    except (ValueError, RecursionError):
        return NO_JSON


def holds_rows(row: object) -> bool:
    """Whether an object is no row itself but holds a list of rows, such as `{"version": 1, "data": [{...},
    ...]}`."""
    if not isinstance(row, dict) or {plain_name(k) for k in row} & _OF_A_ROW:
        return False
    return any(isinstance(v, list) and v and all(isinstance(one, dict) for one in v) for v in row.values())


def _foreign(path: Path, head: bytes) -> str:
    """What is known of a file that is not read, and what to do with it; empty where nothing is."""
    if head.startswith(b"\xd0\xcf\x11\xe0"):
        return f"an Excel workbook of the old kind (.xls); {_AS_CSV}"
    if head.startswith(b"%PDF-"):
        return "a PDF; convert it to text first, and give that to `unspiral data passages`"
    if not head.startswith(b"PK\x03\x04"):
        return ""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError):
        names = []
    if any(name.startswith("xl/") for name in names):
        return f"an Excel workbook (.xlsx); {_AS_CSV}"
    if b"opendocument.spreadsheet" in head[:200]:
        return f"a LibreOffice spreadsheet (.ods); {_AS_CSV}"
    return "a zip archive; unpack it and give the folder"


def _of_one_column(text: str) -> str:
    """A sign that no text has, as that between the columns, where the first line is the name of a single
    column that is known: its texts may hold commas."""
    name = next(csv.reader(text.splitlines()[:1], delimiter=_NO_SIGN), [""])
    return _NO_SIGN if len(name) == 1 and plain_name(name[0]) in (*CONTENTS, *QUESTION) else ""


def _delimiter(text: str) -> str:
    """The sign between the columns of a table, by its header; empty where the first line is no header."""
    header = text.splitlines()[0]
    if "\0" in header:
        return ""
    counts = {sign: len(next(csv.reader([header], delimiter=sign), [])) for sign in "\t,;"}
    sign = max(counts, key=lambda s: counts[s])
    return sign if counts[sign] > 1 else ""
