"""Building an index: checksum, scan, invert or convert, seal. All in a folder aside, which is renamed at the
end."""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import orjson

from retriever_service.errors import BadSetting, EnvironmentLacks, IndexInvalid
from retriever_service.index import FORMAT, META_FILE, IndexInfo, file_digest, read_info, verify
from retriever_service.indexing.corpus import checksum, corpus_bytes, estimate, extent
from retriever_service.indexing.scan import PROGRESS_FILE, SCRATCH_FILES, Scanner, ScanState
from retriever_service.indexing.sinks import PostingsSink, VectorSink
from retriever_service.rows import BLOCKS_FILE, PLACES_FILE
from services.common.files import lock, put_folder, write_atomically
from services.common.names import accepted

Progress = Callable[[str, float, str], None]
"""Told the stage, the share done (0 to 1) and a short text."""
_ROW_BYTES = 64
"""Of each passage beside its text: its place, the hash of its id, its line, and JSON's own signs."""
REPLACED = "replaced"
"""Where the index that another one replaces lies until that one has its place."""
BACKENDS = ("bm25", "dense", "hybrid")


def build_index(
    corpus: str | Path,
    out: str | Path,
    *,
    backend: str = "bm25",
    skip_bad: bool = False,
    language: str = "english",
    stem: bool = True,
    stop_words: bool = True,
    k1: float = 0.9,
    b: float = 0.4,
    model: str | None = None,
    family: str | None = None,
    vector_type: str = "Flat",
    nprobe: int | None = None,
    ef_search: int | None = None,
    encoder_dtype: str = "auto",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> IndexInfo:
    """Index `corpus` (a file or folder of any layout in docs/data.md) into the folder `out`.

    A build that was interrupted goes on where it was; an index that is already there with the same corpus and
    settings is kept as it is. Memory is bounded by the vocabulary, not by the passages. The options from
    `language` to `b` are for `bm25` and `hybrid`, those from `model` to `encoder_dtype` for `dense` and
    `hybrid`.

    Raises CorpusError (file, line, what was expected; `skip_bad` leaves such lines out and counts them),
    IndexInvalid where `out` holds something else and `overwrite` is not set, EnvironmentLacks where the disk
    is too small or another build is at work.
    """
    from retriever_service.bm25.analysis import Analyzer, AnalyzerSettings

    corpus, out, tell = Path(corpus), Path(out), progress or (lambda stage, share, text: None)
    if backend not in BACKENDS:
        raise BadSetting(f"backend {backend!r}: {accepted(backend, BACKENDS)}")
    settings: dict = {}
    sinks: dict[str, PostingsSink | VectorSink] = {}
    vector_bytes = 0
    if backend != "dense":
        if not 0 < k1 < math.inf or not 0 <= b <= 1:
            raise BadSetting(f"k1 {k1}, b {b}: k1 must be a number above 0 and b from 0 to 1")
        analyzer = Analyzer(AnalyzerSettings(language, stem, stop_words))
        settings |= {"analyzer": analyzer.settings.as_dict(), "k1": k1, "b": b}
        sinks["bm25"] = PostingsSink(analyzer)
    if backend != "bm25":
        if not model:
            raise BadSetting(
                f"backend {backend} needs a model: the folder or hub name of a sentence encoder (--model)"
            )
        from retriever_service.dense.encoder import Encoder, EncoderSettings, family_of

        encoder = Encoder(EncoderSettings(model, family_of(family, model)), dtype=encoder_dtype)
        settings |= {
            "encoder": encoder.settings.as_dict(),
            "fingerprint": encoder.fingerprint,
            "type": vector_type,
        }
        settings["dtype"] = encoder.dtype
        if encoder_dtype == "auto" and not overwrite and (out / META_FILE).is_file():
            settings["dtype"] = read_info(out).settings.get(
                "dtype"
            )  # whatever the machine that made it took for auto
        settings |= {"nprobe": nprobe, "ef_search": ef_search}
        sinks["dense"] = VectorSink(encoder)
        stored = _stored_bytes(encoder.dimension, vector_type)
        vector_bytes = stored if vector_type == "Flat" else 4 * encoder.dimension + stored

    with build_folder(
        corpus,
        out,
        backend,
        settings,
        by="build",
        vector_bytes=vector_bytes,
        skip_bad=skip_bad,
        overwrite=overwrite,
        tell=tell,
    ) as build:
        if build is None:
            return verify(out)
        work = build.work
        state = build.scan(list(sinks.values()))
        if "bm25" in sinks:
            from retriever_service.bm25.build import write_bm25

            write_bm25(
                work,
                work,
                sinks["bm25"].vocabulary,
                k1=k1,
                b=b,
                progress=lambda done, of: tell("invert", done / of, ""),
            )
        if "dense" in sinks:
            from retriever_service.dense.build import write_dense

            write_dense(
                work,
                encoder.dimension,
                state.passages,
                vector_type,
                lambda done, of: tell("vectors", done / of, ""),
            )
        build.seal()
    return read_info(out)


class Build:
    """A build at work in the folder `work`."""

    def __init__(self, corpus: Path, work: Path, key: dict, skip_bad: bool, tell: Progress) -> None:
        self.corpus, self.work, self.key, self._skip_bad, self._tell = corpus, work, key, skip_bad, tell
        self._sinks: list = []

    def scan(self, sinks: list) -> ScanState:
        """Read the corpus into the documents and the sinks, going on from an interrupted scan."""
        scanner = Scanner(self.corpus, self.work, sinks, self.key, skip_bad=self._skip_bad)
        end, tell, self._sinks = extent(self.corpus), self._tell, sinks
        if scanner.resumed_at:
            tell("scan", 0.0, f"going on after {scanner.resumed_at:,} passages")
        self.state = scanner.run(
            lambda s: tell("scan", min(1.0, s.position / end), f"{s.passages:,} passages")
        )
        return self.state

    def seal(self) -> None:
        """Write the description of the index: all but what only the build needed."""
        work, key, state = self.work, self.key, self.state
        left_out = {"lock", META_FILE, *SCRATCH_FILES, *(name for sink in self._sinks for name in sink.files)}
        found = {str(p.relative_to(work)): p for p in sorted(work.rglob("*")) if p.is_file()}
        if not (work / BLOCKS_FILE).stat().st_size:  # no row has other fields
            left_out |= {BLOCKS_FILE, PLACES_FILE}
        files = {name: p for name, p in found.items() if name not in left_out and not name.endswith(".tmp")}
        meta = {
            "format": FORMAT,
            "backend": key["backend"],
            "corpus": str(self.corpus.resolve()),
            "corpus_sha256": key["corpus_sha256"],
            "corpus_bytes": corpus_bytes(self.corpus),
            "passages": state.passages,
            "skipped": state.skipped,
            "skipped_reasons": state.reasons,
            "settings": key["settings"],
            "files": {
                name: {"bytes": p.stat().st_size, "sha256": file_digest(p)} for name, p in files.items()
            },
        }
        write_atomically(work / META_FILE, orjson.dumps(meta, option=orjson.OPT_INDENT_2), durable=True)
        self._tell("done", 1.0, f"{state.passages:,} passages")


@contextmanager
def build_folder(
    corpus: Path,
    out: Path,
    backend: str,
    settings: dict,
    *,
    by: str,
    vector_bytes: int,
    skip_bad: bool,
    overwrite: bool,
    tell: Progress,
) -> Iterator[Build | None]:
    """A folder to build in, renamed to `out` once it is sealed; None where `out` already is that very index.

    `by` is what builds: a build never goes on from what another way of building left, even of an index with
    the same settings. `vector_bytes` is what one passage's vectors take on disk while it builds.
    """
    size = corpus_bytes(corpus)
    sha256 = checksum(corpus, lambda done: tell("checksum", done / max(size, 1), corpus.name))
    key = {
        "format": FORMAT,
        "backend": backend,
        "corpus_sha256": sha256,
        "settings": settings,
        "skip_bad": skip_bad,
        "by": by,
    }
    if out.exists() and not overwrite:
        _require_same(out, key)
        shutil.rmtree(out / REPLACED, ignore_errors=True)
        yield None
        return
    if out.exists():
        _require_replaceable(out)
    if not out.name:
        raise BadSetting(f"--out {out}: expected a folder that can be renamed, such as index/")
    work = out.with_name(out.name + ".building")
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadSetting(
            f"--out {out}: the folder {work} cannot be made ({error.strerror}); give another place"
        ) from None
    if any(work.iterdir()) and not (work / "lock").is_file():
        raise IndexInvalid(f"{work}: holds files that are of no build; remove it, or give another --out")
    with _locked(work):
        sealed = _sealed(work, key)
        if not sealed:
            _require_disk(work, corpus, backend != "dense", vector_bytes)
            try:
                yield Build(corpus, work, key, skip_bad, tell)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                raise EnvironmentLacks(
                    f"disk of {work}: {error.strerror}; make room and give the same command again, which goes on where it was"
                ) from None
        _put(work, out)
    if sealed:
        yield None


def _sealed(work: Path, key: dict) -> bool:
    """Whether a build with this key came to its end there, and only was not given its place."""
    try:
        verify(work)
        return orjson.loads((work / PROGRESS_FILE).read_bytes())["key"] == key
    except (IndexInvalid, OSError, orjson.JSONDecodeError, KeyError):
        return False


def _put(work: Path, out: Path) -> None:
    """Give a sealed build its place. What stands there goes into it first, so that at every moment a whole
    index is there to go on with."""
    sealed = read_info(work).files
    replaced = work / REPLACED
    if out.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    put_folder(work, out, earlier=replaced)
    for path in [*out.iterdir()]:
        if path.is_file() and path.name not in (META_FILE, *sealed):
            path.unlink()
    shutil.rmtree(out / REPLACED, ignore_errors=True)


def _stored_bytes(dimension: int, vector_type: str) -> int:
    from retriever_service.dense.build import stored_bytes

    return stored_bytes(dimension, vector_type)


def _require_replaceable(out: Path) -> None:
    """`--overwrite` replaces an index or an empty folder, never somebody's other files."""
    if not out.is_dir() or (not (out / META_FILE).is_file() and any(out.iterdir())):
        raise IndexInvalid(
            f"{out}: exists and is no index, so --overwrite does not replace it; give another folder"
        )


def _require_same(out: Path, key: dict) -> None:
    """Raise IndexInvalid unless `out` is the index asked for."""
    if not (out / META_FILE).exists():
        raise IndexInvalid(f"{out}: exists and is no index; give another folder")
    have = asdict(verify(out))
    if different := [k for k in ("backend", "corpus_sha256", "settings") if have[k] != key[k]]:
        words = {
            "backend": "another backend",
            "corpus_sha256": "another corpus",
            "settings": "other settings",
        }
        other = " and ".join(words[k] for k in different)
        raise IndexInvalid(f"{out}: holds an index of {other}; give another folder, or --overwrite")


def _require_disk(work: Path, corpus: Path, postings: bool, vector_bytes: int) -> None:
    """Raise EnvironmentLacks where the disk is too small for what the start of the corpus promises: its text,
    three times that with postings, and vectors. What an interrupted build left there counts as free, since it
    is used or removed."""
    text, passages = estimate(corpus)
    there = sum(
        {s.st_ino: s.st_blocks * 512 for s in (p.stat() for p in work.rglob("*") if p.is_file())}.values()
    )
    free, vectors = shutil.disk_usage(work).free + there, passages * vector_bytes
    needed = text * (3 if postings else 1) + passages * _ROW_BYTES + vectors + (16 << 20)
    if free < needed:
        raise EnvironmentLacks(
            f"disk of {work}: {free / 2**30:.1f} GiB free, about {needed / 2**30:.1f} GiB needed for the build "
            f"({passages:,} passages, {text / 2**30:.1f} GiB of text, {vectors / 2**30:.1f} GiB of vectors, estimated)"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        held = lock(folder / "lock")
    except BlockingIOError:
        raise EnvironmentLacks(f"{folder}: another build is at work in it") from None
    with held:
        yield
