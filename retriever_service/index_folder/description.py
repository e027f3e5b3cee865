"""The description of an index folder, and the check that the folder is whole.

`meta.json` is written last. It names the corpus (file, SHA-256), the settings, and every other file with its
size and checksum, so that a torn or truncated index is refused when it is opened, with the reason.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict

import orjson

from retriever_service.errors import IndexInvalid, damaged
from retriever_service.index_folder.corpus import checksum, corpus_bytes
from retriever_service.index_folder.documents import OFFSETS_FILE, TEXT_FILE
from services.common.errors import UserError
from services.common.loading.user_code import with_colon
from services.common.names import near_path

FORMAT = 2
PACKED_FORMAT = 3
"""The format of an index with packed postings. Others stay in the format before, which older versions
read."""
LEFT_OUT = "malformed or with the id of an earlier one, which is kept"
"""What lines are that `skip_bad` leaves out."""
META_FILE = "meta.json"
REPLACED = "replaced"
"""Name of the index that another one replaces, inside that one's folder, until it has its place."""
BACKENDS: dict[str, tuple[str, ...]] = {
    "bm25": ("bm25",),
    "dense": ("dense",),
    "hybrid": ("bm25", "dense"),
}
"""Backends of an index folder, each with its parts. A part is a ranker, and a subfolder of its name."""
_WHOLE_BYTES = 64 << 20
_END_BYTES = 1 << 20


def stamp_of(place: Path) -> tuple[int, int, int] | None:
    """What changes with the file that describes an index; None where there is none now. place: a folder, or
    the file itself."""
    try:
        found = (place / META_FILE if place.is_dir() else place).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class IndexSettings(TypedDict, total=False):
    """The settings that an index was built with. Each part adds its own keys."""

    analyzer: dict[str, Any]
    """BM25: the fields of AnalyzerSettings."""
    columns: dict[str, str]
    """The fields of CorpusKeys, where the corpus has columns of other names."""
    null_is_empty: bool
    """Whether cells such as NULL counted as empty; absent where they did not."""
    k1: float
    b: float
    postings: str
    """BM25: `packed` where the postings are compressed and in segments; absent where bm25s can read them."""
    encoder: dict[str, Any]
    """Dense: the fields of EncoderSettings."""
    fingerprint: str | None
    """Dense: digest of the encoder's weights; None where the encoder is unknown."""
    type: str
    """Dense: type of the vectors, such as `Flat`."""
    dtype: str | None
    """Dense: number type of the encoder."""
    nprobe: int | None
    ef_search: int | None
    rescore: int
    """Dense: passages that are scored again by exact vectors, for each that is asked for; absent for none."""
    rescore_dtype: str
    """Dense: number type of these vectors."""


class FileEntry(TypedDict):
    """One file of an index folder."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class IndexInfo:
    """The description of an index, as `unspiral index info` prints it."""

    format: int = FORMAT
    backend: str
    corpus: str
    """The corpus as it was named at the build; of a remote index its address."""
    corpus_sha256: str = ""
    corpus_bytes: int = 0
    passages: int
    skipped: int = 0
    """Malformed lines that the build left out."""
    skipped_reasons: list[str] = field(default_factory=list)
    settings: IndexSettings
    files: dict[str, FileEntry] = field(default_factory=dict)
    segments: list[str] = field(default_factory=list)
    """Packed postings: folders of passages that were added, each an index of its own. Their rows follow those
    of the index itself."""
    deletions: str = ""
    """Packed postings: the file that lists the rows which are deleted and not merged away yet."""
    bytes: int = 0
    """Size on disk."""


RECORDED = {f.name for f in fields(IndexInfo)} - {"bytes", "segments", "deletions"}
"""Keys of `meta.json` that are required there. The defaults above are for indexes that have no such file."""


def format_of(settings: IndexSettings) -> int:
    """The format of an index with these settings."""
    return PACKED_FORMAT if settings.get("postings") == "packed" else FORMAT


def version_of(info: IndexInfo) -> str:
    """What changes with the content of an index, wherever it lies: a digest of its description."""
    content = {name: value for name, value in asdict(info).items() if name not in ("corpus", "bytes")}
    return hashlib.blake2b(orjson.dumps(content, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()


def work_of(folder: Path) -> Path:
    """The folder in which an index is built or changed, beside it."""
    return folder.with_name(folder.name + ".building")


def file_digest(path: Path) -> str:
    """SHA-256 of a file up to 64 MiB; of a larger one, of its first and last MiB and its size."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            digest.update(file.read())
        else:
            digest.update(file.read(_END_BYTES))
            file.seek(size - _END_BYTES)
            digest.update(file.read() + str(size).encode())
    return digest.hexdigest()


def is_faiss(file: Path) -> bool:
    """Whether a file begins as FAISS's do: with four letters or digits, the first of them I."""
    with file.open("rb") as opened:
        head = opened.read(4)
    return len(head) == 4 and head[:1] == b"I" and head.isalnum()


def told_file(file: Path) -> str:
    """What a file is that was given as an index, and where it goes instead."""
    if is_faiss(file):
        return (
            "a FAISS file; it is served beside its corpus, by `unspiral serve retriever --index "
            f"{file} --corpus FILE`"
        )
    return (
        f"a file, and no index's folder; `unspiral index build --corpus {file} --out DIR` makes one of a "
        "corpus, and a configuration takes the corpus itself as retriever.corpus"
    )


def _meant(folder: Path) -> str:
    """What may be meant by an index that is not there: one beside it, a function, or one to be built."""
    near = near_path(folder, lambda beside: (beside / META_FILE).is_file() or beside.is_file())
    return (
        near or with_colon(str(folder)) or f"; `unspiral index build --corpus FILE --out {folder}` makes one"
    )


def read_info(folder: str | Path) -> IndexInfo:
    """The description of an index, its files unchecked. Raises IndexInvalid."""
    folder = Path(folder)
    path = folder / META_FILE
    if not folder.is_dir():
        if (work_of(folder) / REPLACED / META_FILE).is_file():
            raise IndexInvalid(
                f"index {folder}: the command that was replacing it was killed; give that command again"
            )
        if folder.is_file():
            raise IndexInvalid(f"index {folder}: {told_file(folder)}")
        raise IndexInvalid(f"index {folder}: no such folder{_meant(folder)}")
    if not path.is_file():
        what = f"no index: it has no {META_FILE}"
        if list(folder.glob("segments_*")):
            what = "a Lucene index, which can't be read here"
        raise IndexInvalid(
            f"index {folder}: {what}; `unspiral index build --corpus FILE --out DIR` makes one"
        )
    with damaged(f"{path}: damaged"):
        meta = orjson.loads(path.read_bytes())
        if meta.get("format") not in (FORMAT, PACKED_FORMAT):
            raise IndexInvalid(
                f"index {folder}: format {meta.get('format')}, this version reads {FORMAT} and "
                f"{PACKED_FORMAT}; build it again, with --overwrite",
                other_format=True,
            )
        if absent := RECORDED - meta.keys():
            raise IndexInvalid(
                f"{path}: damaged (it lacks {', '.join(sorted(absent))}); build the index again"
            )
        size = sum(f["bytes"] for f in meta["files"].values())
        size += sum(read_info(folder / segment).bytes for segment in meta.get("segments", []))
        return IndexInfo(**meta, bytes=size)


def verify(folder: str | Path, corpus: str | Path | None = None) -> IndexInfo:
    """Check every file of an index against its recorded size and checksum, and the corpus, if given.

    Raises IndexInvalid, and UserError for a corpus that is not there.
    """
    folder = Path(folder)
    info = read_info(folder)
    if info.backend not in BACKENDS:
        raise IndexInvalid(
            f"{folder / META_FILE}: backend {info.backend!r} is unknown; build the index again"
        )
    for needed in (TEXT_FILE, OFFSETS_FILE, *BACKENDS[info.backend]):
        if not any(name == needed or name.startswith(f"{needed}/") for name in info.files):
            raise IndexInvalid(f"{folder / META_FILE}: damaged (it lists no {needed}); build the index again")
    for name, expected in info.files.items():
        path = folder / name
        if not path.is_file():
            raise IndexInvalid(f"{path}: missing; build the index again")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise IndexInvalid(
                f"{path}: {size} bytes instead of {expected['bytes']}, so it was cut off; build the index "
                "again"
            )
        if file_digest(path) != expected["sha256"]:
            raise IndexInvalid(
                f"{path}: its checksum does not match {META_FILE}, so it is damaged; build the index again"
            )
    for segment in info.segments:
        verify(folder / segment)
    if corpus is not None:
        _require_corpus(Path(corpus), folder, info)
    return info


def _require_corpus(corpus: Path, folder: Path, info: IndexInfo) -> None:
    if not corpus.exists():
        raise UserError(f"corpus {corpus}: no such file{near_path(corpus)}")
    if corpus_bytes(corpus) != info.corpus_bytes or checksum(corpus) != info.corpus_sha256:
        raise IndexInvalid(
            f"index {folder} was built from another corpus ({info.corpus}) than {corpus}; build it again"
        )
