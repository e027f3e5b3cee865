"""Building an index: checksum, scan, invert, seal. Everything happens in a folder aside, which is renamed at the end."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import orjson

from .analysis import Analyzer, AnalyzerSettings
from .bm25_build import write_bm25
from .corpus import checksum
from .errors import BadSetting, EnvironmentLacks, IndexInvalid
from .index import FORMAT, META_FILE, IndexInfo, file_digest, read_info, verify
from .scan import Scanner, replace_file

Progress = Callable[[str, float, str], None]
"""Told the stage, the share done (0 to 1) and a short text."""
_SCAN_FILES = ("terms", "tfs", "counts", "lengths", "hashes", "lines", "vocabulary", "progress.json", "lock")


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
    overwrite: bool = False,
    progress: Progress | None = None,
) -> IndexInfo:
    """Index `corpus` into the folder `out`. A build that was interrupted goes on where it was; one that is already there with the
    same corpus and settings is kept as it is. Memory is bounded by the vocabulary, not by the passages.

    Raises CorpusError (file, line, what was expected; `skip_bad` leaves such lines out and counts them), IndexInvalid where `out`
    holds something else and `overwrite` is not set, EnvironmentLacks where the disk is too small or another build is at work.
    """
    corpus, out = Path(corpus), Path(out)
    tell = progress or (lambda stage, share, text: None)
    if backend != "bm25":
        raise BadSetting(f"backend {backend!r}: accepted is bm25")
    if not k1 > 0 or not 0 <= b <= 1:
        raise BadSetting(f"k1 {k1}, b {b}: k1 must be above 0 and b from 0 to 1")
    analyzer = Analyzer(AnalyzerSettings(language, stem, stop_words))
    settings = {"analyzer": analyzer.settings.as_dict(), "k1": k1, "b": b}
    size = corpus.stat().st_size if corpus.is_file() else 0
    sha256 = checksum(corpus, lambda done: tell("checksum", done / max(size, 1), corpus.name))
    key = {"format": FORMAT, "backend": backend, "corpus_sha256": sha256, "settings": settings, "skip_bad": skip_bad}

    if out.exists() and not overwrite:
        return _kept(out, key)
    work = out.with_name(out.name + ".building")
    work.mkdir(parents=True, exist_ok=True)
    _require_disk(work, size)
    with _locked(work):
        scanner = Scanner(corpus, work, analyzer, key, skip_bad=skip_bad)
        if scanner.resumed_at:
            tell("scan", 0.0, f"going on after {scanner.resumed_at:,} passages")
        state = scanner.run(lambda s: tell("scan", min(1.0, s.position / max(size, 1)), f"{s.passages:,} passages"))
        write_bm25(work, work, scanner.vocabulary, k1=k1, b=b, progress=lambda done, of: tell("invert", done / of, ""))
        for name in _SCAN_FILES[:-1]:
            (work / name).unlink()
        files = {str(p.relative_to(work)): p for p in sorted(work.rglob("*")) if p.is_file() and p.name != "lock"}
        meta = {
            "format": FORMAT,
            "backend": backend,
            "corpus": str(corpus.resolve()),
            "corpus_sha256": sha256,
            "corpus_bytes": size,
            "passages": state.passages,
            "skipped": state.skipped,
            "skipped_reasons": state.reasons,
            "settings": settings,
            "files": {name: {"bytes": p.stat().st_size, "sha256": file_digest(p)} for name, p in files.items()},
        }
        replace_file(work / META_FILE, orjson.dumps(meta, option=orjson.OPT_INDENT_2))
        if out.exists():
            shutil.rmtree(out)
        os.rename(work, out)
    (out / "lock").unlink()
    tell("done", 1.0, f"{state.passages:,} passages")
    return read_info(out)


def _kept(out: Path, key: dict) -> IndexInfo:
    """The index that is already at `out`, if it is the one asked for."""
    if not (out / META_FILE).exists():
        if out.is_dir() and not any(out.iterdir()):
            out.rmdir()
            raise IndexInvalid(f"{out}: was an empty folder and was removed; run the build again")
        raise IndexInvalid(f"{out}: exists and is no index; give another folder")
    info = verify(out)
    have = asdict(info)
    different = [k for k in ("backend", "corpus_sha256", "settings") if have[k] != key[k]]
    if different:
        raise IndexInvalid(f"{out}: holds an index with other {' and '.join(different)}; give another folder, or --overwrite")
    return info


def _require_disk(folder: Path, corpus_bytes: int) -> None:
    free, needed = shutil.disk_usage(folder).free, 3 * corpus_bytes + (16 << 20)
    if free < needed:
        raise EnvironmentLacks(
            f"disk of {folder}: {free / 2**30:.1f} GiB free, about {needed / 2**30:.1f} GiB needed for the build"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EnvironmentLacks(f"{folder}: another build is at work in it") from None
        yield
