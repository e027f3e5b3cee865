"""Building an index: checksum, scan, invert or convert, seal.

All of it happens in a folder aside, which is renamed at the end.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from retriever_service.errors import IndexInvalid
from retriever_service.index_folder.corpus import checksum, corpus_bytes, estimate, extent
from retriever_service.index_folder.description import (
    BACKENDS,
    META_FILE,
    REPLACED,
    IndexInfo,
    IndexSettings,
    format_of,
    read_info,
    verify,
)
from retriever_service.index_folder.held_ids import HeldIds
from retriever_service.index_folder.keys import NO_KEYS, CorpusKeys
from retriever_service.index_folder.remarks import Remarks
from retriever_service.index_folder.repeated import repeated_ids
from retriever_service.indexing.pace import Pace
from retriever_service.indexing.parts import BM25Part, DensePart, PackedPart, Part, Progress
from retriever_service.indexing.scan import Scanner, ScanState
from retriever_service.indexing.sinks import Sink
from retriever_service.indexing.workplace import (
    Key,
    full_disk_said,
    locked,
    put,
    put_back,
    seal_folder,
    sealed,
    useless_removed,
    work_folder,
)
from services.common.answers import clean_text
from services.common.counting import size_of
from services.common.errors import EnvironmentLacks, UserError
from services.common.files import followed
from services.common.names import accepted

POSTINGS_SHARE = 2.0
USUAL = {"k1": 0.9, "b": 0.4}
"""BM25's numbers where none are given, as in Anserini."""
PACKED_SHARE = 1.0
"""Bytes that postings take during the build, per byte of text: of packed ones, runs and postings."""
_ROW_BYTES = 64
"""Of each passage beside its text: its place, the hash of its id, its line, and JSON's own signs."""
POSTINGS = ("auto", "bm25s", "packed")
AUTO_PACKED = 2_000_000
"""Passages from which on the postings of an index are packed by default."""


def build_index(
    corpus: str | Path,
    out: str | Path,
    *,
    backend: str = "bm25",
    skip_bad: bool = False,
    keys: CorpusKeys = NO_KEYS,
    language: str = "english",
    stem: bool = True,
    stop_words: bool = True,
    k1: float = USUAL["k1"],
    b: float = USUAL["b"],
    postings: str = "auto",
    model: str | None = None,
    family: str | None = None,
    vector_type: str = "Flat",
    nprobe: int | None = None,
    ef_search: int | None = None,
    encoder_dtype: str = "auto",
    encoders: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
    remarks: Remarks | None = None,
) -> IndexInfo:
    """Index `corpus` (a file or folder of any layout in docs/data.md) into the folder `out`.

    A build that was interrupted goes on where it was; an index that is already there with the same corpus and
    settings is kept as it is. Memory is bounded by the vocabulary, not by the passages. The options from
    `language` to `postings` are for `bm25` and `hybrid`, those from `model` to `encoders` for `dense`
    and `hybrid`. `encoders` encode side by side, each on a GPU of its own or with its share of the
    cores; 0 is one per GPU, and one on a CPU. In float32 on a CPU the index is the same bytes for any number.
    `postings`: `bm25s` is the format of that library, `packed` a compressed one for many
    passages, which can be added to; `auto` is `packed` from AUTO_PACKED passages on.
    `keys`: columns of names of their own; additions are read by them too. `remarks` is filled with what is
    better known of the passages, where this call has read them.

    Raises UserError for a wrong option or a malformed line (file, line, what was expected; `skip_bad` leaves
    such lines out, and passages with the id of an earlier one, and counts them), IndexInvalid where `out`
    holds something else and `overwrite` is not set,
    EnvironmentLacks where the disk is too small or another build is at work.
    """
    if backend not in BACKENDS:
        raise UserError(f"backend {backend!r}: {accepted(backend, BACKENDS)}")
    parts: list[Part] = []
    if "bm25" in BACKENDS[backend]:
        part = PackedPart if _packed(postings, corpus, Path(out), overwrite) else BM25Part
        parts.append(part(language, stem, stop_words, k1, b))
    if "dense" in BACKENDS[backend]:
        if not model:
            raise UserError(
                f"backend {backend} needs a model: the folder or hub name of a sentence encoder (--model)"
            )
        parts.append(DensePart(model, family, vector_type, nprobe, ef_search, encoder_dtype, encoders))
    out = Path(out)
    # A part of the settings: an index of other columns is another one.
    settings: IndexSettings = {"columns": keys.given} if keys else {}
    if keys.null_is_empty:
        settings["null_is_empty"] = True
    for one in parts:
        settings.update(one.settings)
    if "dtype" in settings and encoder_dtype == "auto" and not overwrite and (out / META_FILE).is_file():
        # The index may come from a machine where `auto` was another type: it counts as the same index.
        settings["dtype"] = read_info(out).settings.get("dtype")
    plan = Plan(
        corpus=Path(corpus),
        out=out,
        backend=backend,
        settings=settings,
        by="build",
        vector_bytes=sum(part.vector_bytes for part in parts),
        skip_bad=skip_bad,
        overwrite=overwrite,
        tell=progress or silent,
    )

    def write(build: Build) -> None:
        try:
            state = build.scan([part.sink for part in parts])
            passages = state.passages
            if remarks is not None:
                remarks.take(state.remarks)
        finally:
            for part in parts:
                part.close()
        for part in parts:
            part.write(build.work, passages, plan.tell)

    return make_index(plan, write)


def _packed(postings: str, corpus: str | Path, out: Path, overwrite: bool) -> bool:
    """Whether an index gets packed postings."""
    if postings not in POSTINGS:
        raise UserError(f"postings {postings!r}: {accepted(postings, POSTINGS)}")
    if postings != "auto":
        return postings == "packed"
    if not overwrite and (out / META_FILE).is_file():  # whichever it has, it counts as the same index
        return read_info(out).settings.get("postings") == "packed"
    return estimate(Path(corpus))[1] >= AUTO_PACKED


def silent(stage: str, share: float, text: str) -> None:
    """A Progress that says nothing."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be made, from what, and where."""

    corpus: Path
    out: Path
    backend: str
    settings: IndexSettings
    by: str
    """The way of building. One way never goes on from files that another left, even of an index with the
    same settings."""
    vector_bytes: int
    """Bytes of disk that the vectors of one passage take during the build."""
    skip_bad: bool
    overwrite: bool
    tell: Progress


class Build:
    """A build at work in the folder `work`."""

    def __init__(self, corpus: Path, work: Path, key: Key, skip_bad: bool, tell: Progress) -> None:
        self.corpus = corpus
        self.work = work
        self.key = key
        self._skip_bad = skip_bad
        self._tell = tell
        self._sinks: Sequence[Sink] = []

    def scan(self, sinks: Sequence[Sink], held: HeldIds | None = None) -> ScanState:
        """Read the corpus into the documents and the sinks, going on from an interrupted scan. held: the ids
        of the index that is added to; with `skip_bad` their passages are left out."""
        end = extent(self.corpus)
        tell = self._tell

        def looked(passages: int, position: int) -> None:
            tell("ids", min(1.0, position / end), f"{passages:,} passages")

        keys = CorpusKeys.of(self.key["settings"])
        repeated = repeated_ids(self.corpus, looked, held, keys) if self._skip_bad else None
        scanner = Scanner(self.corpus, self.work, sinks, self.key, skip_bad=self._skip_bad, repeated=repeated)
        self._sinks = sinks
        if scanner.resumed_at:
            tell("scan", 0.0, f"going on after {scanner.resumed_at:,} passages")
        pace = Pace(scanner.state.position)

        def note(state: ScanState) -> None:
            speeds = [sink.note() for sink in sinks]
            words = [f"{state.passages:,} passages", *speeds, pace.left(state.position, end)]
            tell("scan", min(1.0, state.position / end), ", ".join(word for word in words if word))

        self.state = scanner.run(note)
        return self.state

    def seal(self) -> None:
        """Write the description of the index: all but what only the build needed."""
        key = self.key
        state = self.state
        description = {
            "format": format_of(key["settings"]),
            "backend": key["backend"],
            "corpus": clean_text(str(self.corpus.resolve())),  # a name may be no UTF-8
            "corpus_sha256": key["corpus_sha256"],
            "corpus_bytes": corpus_bytes(self.corpus),
            "passages": state.passages,
            "skipped": state.skipped,
            "skipped_reasons": state.reasons,
            "settings": key["settings"],
        }
        seal_folder(self.work, description, [name for sink in self._sinks for name in sink.files])
        self._tell("done", 1.0, f"{state.passages:,} passages")


def make_index(
    plan: Plan, write: Callable[[Build], None], examine: Callable[[Path], None] = lambda folder: None
) -> IndexInfo:
    """Make the index of a plan: `write` fills a folder aside, which is then sealed and renamed to `plan.out`.

    An index that is already there with the same corpus and settings is kept, and `write` is not called.
    `examine` is given the folder of the whole index before it takes its place: where it raises, what stands
    at `plan.out` stays. Where that is a link, the folder that it leads to is replaced.
    """
    corpus = plan.corpus
    out = followed(plan.out)
    size = corpus_bytes(corpus)
    sha256 = checksum(corpus, lambda done: plan.tell("checksum", done / max(size, 1), corpus.name))
    key = {
        "format": format_of(plan.settings),
        "backend": plan.backend,
        "corpus_sha256": sha256,
        "settings": plan.settings,
        "skip_bad": plan.skip_bad,
        "by": plan.by,
    }
    if out.exists() and not plan.overwrite:
        _require_same(out, key)
        shutil.rmtree(out / REPLACED, ignore_errors=True)
        examine(out)
        return read_info(out)
    if out.exists():
        _require_replaceable(out)
    work = work_folder(out)
    with locked(work), useless_removed(work, key):
        # One that is sealed is whole already: the kill came before it had its name.
        if not sealed(work, key):
            if put_back(out) and not plan.overwrite:
                _require_same(out, key)
                return read_info(out)
            share = PACKED_SHARE if plan.settings.get("postings") == "packed" else POSTINGS_SHARE
            require_disk(work, corpus, share if plan.backend != "dense" else 0.0, plan.vector_bytes)
            with full_disk_said(work):
                build = Build(corpus, work, key, plan.skip_bad, plan.tell)
                write(build)
                build.seal()
        examine(work)
        put(work, out)
    return read_info(out)


def _require_replaceable(out: Path) -> None:
    """`--overwrite` replaces an index or an empty folder, never somebody's other files."""
    if not out.is_dir() or (not (out / META_FILE).is_file() and any(out.iterdir())):
        raise IndexInvalid(
            f"{out}: exists and is no index, so --overwrite does not replace it; give another folder"
        )


def _require_same(out: Path, key: Key) -> None:
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


def require_disk(work: Path, corpus: Path, postings: float, vector_bytes: int) -> None:
    """Raise EnvironmentLacks where the disk is too small for what the start of the corpus promises: its text,
    `postings` bytes beside each byte of it, and vectors."""
    text, passages = estimate(corpus)
    vectors = passages * vector_bytes
    require_free(
        work,
        round(text * (1 + postings)) + passages * _ROW_BYTES + vectors,
        f"for the build ({passages:,} passages, {size_of(text)} of text, {size_of(vectors)} of vectors, "
        "estimated)",
    )


def require_free(work: Path, needed: int, what: str) -> None:
    """Raise EnvironmentLacks where the disk of this folder has fewer bytes free. What an interrupted build
    left there counts as free, since it is used or removed."""
    needed += 16 << 20
    # By inode: files may be links to one another, and take their place once.
    there = sum(
        {s.st_ino: s.st_blocks * 512 for s in (p.stat() for p in work.rglob("*") if p.is_file())}.values()
    )
    free = shutil.disk_usage(work).free + there
    if free < needed:
        raise EnvironmentLacks(f"disk of {work}: {size_of(free)} free, about {size_of(needed)} needed {what}")
