"""From documents of your own (text, Markdown, or rows with long texts or without ids) to a corpus of short
passages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

from retriever_service.index_folder.keys import NO_KEYS, CorpusKeys, title_and_text
from retriever_service.index_folder.passages import no_value_in
from services.common.counting import counted
from services.common.errors import UserError
from services.common.files import written_aside
from services.common.names import near_path
from services.common.records import Record, data_files, field_of, no_utf8, read_records
from services.common.records.columns import CONTENTS, IDENTITY, is_missing, plain_name
from services.common.records.files import DOCUMENTS, refuse_pipe
from trainer.data.corpora.taken import Taken
from trainer.data.questions import refused

ENCODINGS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
ROWS = {".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow"}
"""Endings of files of rows, packed ones too (`.jsonl.gz`)."""
_FENCE = re.compile(r"\s*(```|~~~)")
_HEADING = re.compile(r"#{1,6}\s+(.*?)\s*#*\s*$")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])")


class Section(NamedTuple):
    """A part of a document below one heading."""

    title: str
    paragraphs: list[str]


class Document(NamedTuple):
    """One document, or one row."""

    place: str
    """For messages."""
    id: str
    sections: list[Section]
    fields: dict[str, Any]
    """What every passage of it keeps."""
    new_id: str
    """Its id where another one has its own."""


@dataclass
class Made:
    """The findings of one call."""

    documents: int = 0
    passages: int = 0
    empty: list[str] = field(default_factory=list)
    """Documents of which no passage was made."""
    left_out: list[str] = field(default_factory=list)
    """Files of a folder that were not read, each with the reason."""
    of_documents: bool = False
    """Whether files are read as documents, and not rows."""
    bad: list[str] = field(default_factory=list)
    """Documents and rows that could not be read, with `skip_bad`: place and reason."""
    no_value: list[str] = field(default_factory=list)
    """Rows whose text, title or id is what tables hold where there is nothing, such as NULL."""
    renamed: list[str] = field(default_factory=list)
    """Rows whose id another one had before, with their new ones."""
    words: list[int] = field(default_factory=list)
    """Words of each passage, without its title."""


def write_passages(
    src: Path, dst: Path, *, words: int, skip_bad: bool = False, keys: CorpusKeys = NO_KEYS
) -> Made:
    """Write the passages of all documents of a file or folder to `dst`, JSON Lines, aside and renamed. Each
    has an id of its own: a row whose id stands before gets another one.

    words: most words of a passage. keys: columns of rows. Raises UserError for a file or row that cannot be
    read (`skip_bad` leaves it out and counts it), and where no passage is made.
    """
    if src.is_dir() and dst.resolve().is_relative_to(src.resolve()):
        raise UserError(f"{dst}: lies in the folder {src}, which is read; give a file outside of it to write")
    if dst.exists() and src.exists() and dst.samefile(src):
        raise UserError(f"{dst}: is the source itself; give another file to write")
    made = Made()
    taken = Taken()
    with written_aside(dst) as aside, aside.open("w", encoding="utf-8") as out:
        documents = _documents(src, made, keys)
        for document in documents:
            if isinstance(document, UserError):
                if not skip_bad:
                    what = "documents" if made.of_documents else "rows"
                    raise refused(document, documents, made.documents, "--skip-bad", what)
                made.bad.append(str(document))
                continue
            made.documents += 1
            passages = list(_passages(document.sections, words))
            if not passages:
                made.empty.append(document.place)
            name, ids = _free_ids(document, len(passages), taken)
            if name != document.id:
                made.renamed.append(f"{document.place}: the id {document.id!r} stands before; now {name!r}")
            for id, (title, text) in zip(ids, passages, strict=True):
                contents = f'"{title}"\n{text}' if title else text
                row = {"id": id, "contents": contents} | document.fields
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
                made.passages += 1
                made.words.append(len(text.split()))
        if made.bad and not made.documents:
            raise UserError(
                f"{src}: none of its {counted(len(made.bad), 'row')} can be read; the first: {made.bad[0]}"
            )
        if not made.passages:
            raise UserError(
                f"{src}: holds no text; expected documents ({', '.join(sorted(DOCUMENTS))}) or rows"
            )
    return made


def _free_ids(document: Document, passages: int, taken: Taken) -> tuple[str, list[str]]:
    """The id of a document, and those of its passages, which no other one has."""
    names = chain([document.id, document.new_id], (f"{document.new_id}_{n}" for n in count(2)))
    for name in names:
        ids = [name] if passages == 1 else [f"{name}#{number}" for number in range(passages)]
        own = dict.fromkeys([name, *ids])
        if not any(id in taken for id in own):
            for id in own:
                taken.add(id)
            break
    return name, ids


def _documents(src: Path, made: Made, keys: CorpusKeys) -> Iterator[Document | UserError]:
    """Each document, or why it is none."""
    shown: list[Path] = []
    if src.is_file():
        files = [src] if src.suffix.lower() in DOCUMENTS else []
    elif src.is_dir():
        whole = [p for p in sorted(src.rglob("*")) if p.is_file()]
        shown = [p for p in whole if not any(part.startswith(".") for part in p.relative_to(src).parts)]
        files = [p for p in shown if p.suffix.lower() in DOCUMENTS]
        rows = [p for p in shown if p not in files and _holds_rows(p)] if files else []
        if rows and all(file.stem.lower() == "readme" for file in files):
            files = []  # it says something of the rows
        elif rows:
            raise UserError(
                f"{src}: holds both documents ({_named(files, src)}) and rows ({_named(rows, src)}); "
                "give the file itself, or a folder with one kind"
            )
    else:
        refuse_pipe(src)
        raise UserError(f"{src}: no such file or folder{near_path(src)}")
    if files and keys:
        raise UserError(f"{src}: holds documents; --text-key, --title-key and --id-key go with rows")
    keys.check(src)
    read = files or data_files(src)
    kind = "document (.md, .rst, .txt)" if files else "data file"
    made.left_out += [f"{file}: left out, no {kind}" for file in shown if file not in read]
    made.of_documents = bool(files)
    for file in files:
        name = file.relative_to(src).as_posix() if src.is_dir() else file.name
        try:
            yield Document(str(file), name, sections_of(_text(file), Path(name).stem), {"source": name}, name)
        except UserError as error:
            yield error
    if files:
        return
    for number, record in enumerate(read_records(src)):
        try:
            yield _of_row(record, number, keys, made)
        except UserError as error:
            yield error


def _holds_rows(file: Path) -> bool:
    """By its name; JSON, which is a setting of some tool in many a folder, by its first record."""
    kinds = {suffix.lower() for suffix in file.suffixes}
    if kinds & ROWS:
        return True
    if ".json" not in kinds:
        return False
    try:
        first = next(read_records(file), None)
    except UserError:
        return False
    return first is not None and first.fields is not None and field_of(first.fields, CONTENTS) is not None


def _named(files: list[Path], folder: Path) -> str:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return files[0].relative_to(folder).as_posix() + more


def _text(file: Path) -> str:
    raw = file.read_bytes()
    encoding = ENCODINGS.get(raw[:2], "utf-8-sig")
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        if encoding == "utf-8-sig":
            line = raw.count(b"\n", 0, error.start) + 1
            raise UserError(f"{file}, line {line}: {no_utf8(file)}") from None
        raise UserError(f"{file}: no {encoding.upper()} text: byte {error.start} is none of it") from None


def _of_row(record: Record, number: int, keys: CorpusKeys, made: Made) -> Document:
    if record.fields is None:
        raise UserError(f"{record.place}: {record.problem}")
    row = keys.applied(record.fields)
    found = field_of(row, CONTENTS)
    if found is None:
        empty = next((name for name in row if plain_name(name) in CONTENTS), None)
        found = None if empty is None else (empty, "")
    if found is None or not isinstance(found[1], str):
        columns = ", ".join(map(str, row)) or "none"
        expected = f"expected one of {', '.join(CONTENTS)}, got {columns}"
        raise UserError(f"{record.place}: no text; {expected}; --text-key names a column of another name")
    title = field_of(row, ["title"])
    identity = field_of(row, IDENTITY)
    used = {one[0] for one in (found, title, identity) if one is not None}
    new_id = f"{record.file.name.split('.')[0]}_{number}"
    name = str(identity[1]).strip() if identity is not None else new_id
    above, text = (str(title[1]).strip(), found[1]) if title is not None else title_and_text(found[1])
    if (what := no_value_in(above, text, name)) is not None:
        made.no_value.append(f"{record.place}: {what}")
    return Document(record.place, name, [Section(above, _paragraphs(text))], _others(row, used), new_id)


def _others(row: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    plain = (str, int, float, bool)
    return {k: v for k, v in row.items() if k not in used and not is_missing(v) and isinstance(v, plain)}


def sections_of(text: str, name: str) -> list[Section]:
    """The sections of a document, each with the document's title and its own heading. name: the title of a
    document that begins with none."""
    lines = text.splitlines()
    if lines and lines[0].strip() == "---" and "---" in (later := [line.strip() for line in lines[1:]]):
        lines = lines[later.index("---") + 2 :]  # front matter
    title = ""
    heading = ""
    body: list[str] = []
    sections = []
    fenced = False

    def close() -> None:
        own = ", ".join(dict.fromkeys(part for part in (title or name, heading) if part))
        if paragraphs := _paragraphs("\n".join(body)):
            sections.append(Section(own, paragraphs))
        body.clear()

    for line in lines:
        fenced ^= _FENCE.match(line) is not None
        found = None if fenced else _HEADING.match(line)
        if found is None:
            body.append(line)
            continue
        close()
        if not title and not sections:
            title = found[1]
        else:
            heading = found[1]
    close()
    return sections


def _paragraphs(text: str) -> list[str]:
    parts = re.split(r"\n\s*\n", text.replace("\r\n", "\n"))
    return [joined for part in parts if (joined := " ".join(part.split()))]


def _passages(sections: Iterable[Section], words: int) -> Iterator[tuple[str, str]]:
    """(title, text) of passages of at most `words` words: whole paragraphs as far as they fit, otherwise
    whole sentences, otherwise words. A section begins a passage."""
    for section in sections:
        held: list[str] = []
        size = 0
        for piece in (piece for p in section.paragraphs for piece in _pieces(p, words)):
            count = len(piece.split())
            if held and size + count > words:
                yield section.title, "\n".join(held)
                held, size = [], 0
            held.append(piece)
            size += count
        if held:
            yield section.title, "\n".join(held)


def _pieces(paragraph: str, words: int) -> Iterator[str]:
    """The paragraph where it fits, otherwise runs of its sentences that fit."""
    if len(paragraph.split()) <= words:
        yield paragraph
        return
    held: list[str] = []
    for sentence in _SENTENCE.split(paragraph):
        own = sentence.split()
        if held and len(held) + len(own) > words:
            yield " ".join(held)
            held = []
        while len(own) > words:
            yield " ".join(own[:words])
            own = own[words:]
        held += own
    if held:
        yield " ".join(held)
