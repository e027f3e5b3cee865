"""Adding passages to an index of packed postings and deleting some of them: by segments, without touching a
file that is there.

An addition is built aside as an index of its own, moved into `segments/`, and counts once `meta.json` names
it; a deletion is a new file that `meta.json` names. So a process that is killed leaves the index as it was,
or as it was to become. `retriever_service.indexing.merge` makes one index of the segments.
"""

from __future__ import annotations

import hashlib
import shlex
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import orjson

from retriever_service.bm25.analysis import Analyzer, AnalyzerSettings
from retriever_service.bm25.packed.build import write_packed
from retriever_service.errors import IndexInvalid
from retriever_service.index_folder.corpus import are_numbered, checksum, corpus_bytes, unit_of
from retriever_service.index_folder.description import META_FILE, IndexInfo, read_info, verify
from retriever_service.index_folder.held_ids import HeldIds
from retriever_service.index_folder.keys import CorpusKeys
from retriever_service.index_folder.remarks import Remarks
from retriever_service.index_folder.segments import (
    Deletions,
    SegmentedDocuments,
    SegmentedRows,
    folders_of,
    read_deletions,
)
from retriever_service.indexing.build import PACKED_SHARE, USUAL, Build, require_disk, silent
from retriever_service.indexing.parts import Progress
from retriever_service.indexing.sinks import RunsSink
from retriever_service.indexing.workplace import (
    Key,
    changing,
    folder_meant,
    full_disk_said,
    sealed,
    tidy,
    useless_removed,
)
from services.common.counting import counted
from services.common.errors import UserError
from services.common.files import put_folder, sync, write_atomically
from services.common.users_files import reading

MOST_SEGMENTS = 32
"""Additions that an index holds before it must be merged: each costs every search a little."""


def add_to_index(
    index: str | Path,
    corpus: str | Path,
    *,
    skip_bad: bool = False,
    progress: Progress | None = None,
    remarks: Remarks | None = None,
) -> IndexInfo:
    """Add the passages of a corpus to an index of packed postings. The same command goes on where it was
    killed. remarks: as for a build.

    Raises UserError for a malformed line, as a build does, for a row without an id, and for an id that the
    index has (`skip_bad` leaves such lines out and counts them; where no passage is left, the index stays as
    it is). `skipped` of the result counts the lines of this corpus alone. Raises IndexInvalid for an index
    that takes no additions; EnvironmentLacks as a build does.
    """
    index = folder_meant(index)
    corpus = Path(corpus)
    tell = progress or silent
    read_info(index)  # before a folder is made beside it
    with changing(index) as work:
        info = packed_info(index)
        if len(info.segments) >= MOST_SEGMENTS:
            raise UserError(
                f"index {index}: holds {MOST_SEGMENTS} additions; `unspiral index merge {index}` makes one "
                "index of them"
            )
        columns = CorpusKeys.of(info.settings)
        try:
            columns.check(corpus)
        except UserError as error:
            raise UserError(f"{error}; an addition needs the columns that the index was built with") from None
        if are_numbered(corpus, columns):
            raise UserError(
                f"{corpus}: its rows have no ids, and their numbers from 0 on are no ids of new passages; "
                "`unspiral data passages` writes a corpus with ids"
            )
        size = corpus_bytes(corpus)
        sha256 = checksum(corpus, lambda done: tell("checksum", done / max(size, 1), corpus.name))
        key: Key = {
            "format": info.format,
            "backend": info.backend,
            "corpus_sha256": sha256,
            "settings": info.settings,
            "skip_bad": skip_bad,
            "by": "add",
            "to": info.corpus_sha256,
        }
        if not sealed(work, key):
            with useless_removed(work, key), full_disk_said(work):
                require_disk(work, corpus, PACKED_SHARE, 0)
                build = Build(corpus, work, key, skip_bad, tell)
                sink = RunsSink(Analyzer(AnalyzerSettings(**info.settings["analyzer"])))
                with HeldIds(index, info) as held:
                    scanned = build.scan([sink], held)
                    if remarks is not None:
                        remarks.take(scanned.remarks)
                    sink.close()
                    if not scanned.passages:
                        shutil.rmtree(work)
                        return replace(info, skipped=scanned.skipped, skipped_reasons=scanned.reasons)
                    _refuse_held_ids(held, index, corpus, work)
                write_packed(
                    work,
                    k1=info.settings["k1"],
                    b=info.settings["b"],
                    progress=lambda done, of: tell("merge", done / max(of, 1), f"{done:,} postings"),
                )
                build.seal()
        added = read_info(work)
        # First the folder, then the description that names it: a kill in between leaves a folder without a
        # name, which the next change removes.
        name = f"segments/{1 + max([0, *(int(Path(s).name) for s in info.segments)]):04d}"
        place = index / name
        place.parent.mkdir(exist_ok=True)
        _remove_unnamed(index, info)
        put_folder(work, place, earlier=place.with_suffix(".old"))
        tidy(place)
        sync(place.parent)
        changed = replace(
            info,
            corpus=f"{info.corpus} + {added.corpus}",
            corpus_sha256=_digest(info.corpus_sha256, sha256),
            corpus_bytes=info.corpus_bytes + added.corpus_bytes,
            passages=info.passages + added.passages,
            skipped=info.skipped + added.skipped,
            skipped_reasons=(info.skipped_reasons + added.skipped_reasons)[:3],
            segments=[*info.segments, name],
        )
        _commit(index, changed)
    return replace(read_info(index), skipped=added.skipped, skipped_reasons=added.skipped_reasons)


def delete_from_index(index: str | Path, ids: Sequence[str]) -> IndexInfo:
    """Delete the passages with these ids: all of them, or none where one is not there (UserError)."""
    index = folder_meant(index)
    read_info(index)  # before a folder is made beside it
    with changing(index) as work:
        info = packed_info(index)
        folders = folders_of(index, info)
        before = read_deletions(index, info)
        documents = SegmentedDocuments(folders)
        rows = SegmentedRows(folders, documents, before["rows"])
        analyzer = Analyzer(AnalyzerSettings(**info.settings["analyzer"]))
        found: dict[int, list[str]] = {}
        for wanted in ids:
            own = [row for row in rows.find(wanted) if documents.get(row)[0] == wanted]
            if not own:
                raise UserError(f"index {index}: has no passage with the id {wanted!r}; nothing was deleted")
            found[own[0]] = analyzer.terms(documents.get(own[0])[1])
        documents.close()
        if len(found) >= info.passages:
            raise UserError(f"index {index}: these are all its passages; remove the folder instead")
        frequencies = Counter(before["frequencies"])
        for terms in found.values():
            frequencies.update(set(terms))
        after = Deletions(
            rows=sorted([*before["rows"], *found]),
            tokens=before["tokens"] + sum(map(len, found.values())),
            frequencies=dict(frequencies),
        )
        content = orjson.dumps(after)
        name = f"deletions.{len(after['rows'])}.json"
        write_atomically(index / name, content, durable=True)
        files = {file: entry for file, entry in info.files.items() if file != info.deletions}
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        changed = replace(
            info,
            corpus_sha256=_digest(info.corpus_sha256, hashlib.sha256(content).hexdigest()),
            passages=info.passages - len(found),
            files=files,
            deletions=name,
        )
        _commit(index, changed)
        _remove_unnamed(index, changed)
        if [path.name for path in work.iterdir()] == ["lock"]:
            shutil.rmtree(work)
    return read_info(index)


def read_ids(path: Path) -> list[str]:
    """The ids of a file, one a line. Raises UserError."""
    with reading(f"--ids {path}", "UTF-8 text"):
        lines = path.read_text("utf-8-sig").split("\n")  # an id may hold any other line break of Unicode's
    return [line for line in lines if line]


def packed_info(index: Path) -> IndexInfo:
    """The description of an index that can be changed. Raises IndexInvalid for another one."""
    info = verify(index)
    if info.backend != "bm25" or info.settings.get("postings") != "packed":
        how = (
            f"`{packed_command(index, info)}` makes it one"
            if info.backend == "bm25"
            else f"a {info.backend} index is built again, of a folder with the files of both corpora"
        )
        raise IndexInvalid(
            f"index {index}: only bm25 indexes of packed postings are added to, deleted from and merged; "
            f"{how}"
        )
    return info


def packed_command(index: Path, info: IndexInfo) -> str:
    """The command that builds a bm25 index again, as it is but with packed postings."""
    settings = info.settings
    words = ["unspiral", "index", "build", info.corpus, "--out", str(index), "--postings", "packed"]
    words += ["--overwrite", *(["--skip-bad"] if info.skipped else [])]
    for name, column in settings.get("columns", {}).items():
        words += [f"--{name}-key", column]
    words += ["--null-is-empty"] if settings.get("null_is_empty") else []
    analyzer, usual = settings.get("analyzer", {}), AnalyzerSettings()
    if (language := analyzer.get("language", usual.language)) != usual.language:
        words += ["--language", language]
    words += [
        f"--no-{name.replace('_', '-')}" for name in ("stem", "stop_words") if analyzer.get(name) is False
    ]
    for name, value in (("k1", settings["k1"]), ("b", settings["b"])):
        if value != USUAL[name]:
            words += [f"--{name}", f"{value:g}"]
    return shlex.join(words)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _commit(index: Path, info: IndexInfo) -> None:
    """Make a change count."""
    meta = asdict(info)
    del meta["bytes"]
    write_atomically(index / META_FILE, orjson.dumps(meta, option=orjson.OPT_INDENT_2), durable=True)


def _remove_unnamed(index: Path, info: IndexInfo) -> None:
    """Remove what a change that was killed left, or one that another change replaced."""
    for path in (index / "segments").glob("*"):
        if f"segments/{path.name}" not in info.segments:
            shutil.rmtree(path)
    for path in index.glob("deletions.*.json"):
        if path.name != info.deletions:
            path.unlink()


def _refuse_held_ids(held: HeldIds, index: Path, corpus: Path, work: Path) -> None:
    """Raise UserError where a passage to be added has an id that the index has."""
    lines = np.fromfile(work / "lines", np.uint64)
    added = SegmentedDocuments([work])
    suspects = held.hashed(np.fromfile(work / "hashes", np.uint64)).tolist()
    for row in suspects:
        identity = added.get(row)[0]
        if identity in held:
            there = counted(len(suspects), "passage of it is", "passages of it are")
            raise UserError(
                f"{corpus}, {unit_of(corpus)} {lines[row]}: id {identity!r} is in the index {index} already; "
                f"{there} there by id: `unspiral index delete` takes such out, and --skip-bad does not add "
                "them"
            )
    added.close()
