"""The first stage of a build: read the corpus once, write documents, postings and vectors to disk. Can be
killed and gone on with.

Files are only appended to. After each chunk of passages the files are synced and `progress.json` is replaced,
which holds their lengths; going on cuts the files back to those lengths and reads on from the recorded
position, so the result is the same bytes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from retriever_service.index_folder.corpus import Passage, Skipped, read_corpus, unit_of
from retriever_service.index_folder.documents import OFFSETS_FILE, TEXT_FILE, Documents, encode_document
from retriever_service.index_folder.keys import CorpusKeys
from retriever_service.index_folder.remarks import Remarks
from retriever_service.index_folder.repeated import IN_INDEX, Repeated
from retriever_service.index_folder.rows import BLOCKS_FILE, PLACES_FILE, hash_of, write_fields, write_lookup
from retriever_service.indexing.sinks import RunsSink, Sink
from services.common.counting import counted
from services.common.errors import UserError
from services.common.files import hints, write_atomically

PROGRESS_FILE = "progress.json"
SCRATCH_FILES = ("hashes", "urls", "lines", PROGRESS_FILE)
_OWN_FILES = (TEXT_FILE, OFFSETS_FILE, BLOCKS_FILE, PLACES_FILE, "hashes", "urls", "lines")


@dataclass
class ScanState:
    """How far a scan has come. `sizes` are the bytes of each file that are whole."""

    key: dict[str, Any]
    line: int = 0
    position: int = 0
    passages: int = 0
    skipped: int = 0
    reasons: list[str] = field(default_factory=list)
    read: bool = False
    """Whether the whole corpus was read; then its ids are looked at."""
    done: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    remarks: dict[str, Any] = field(default_factory=dict)
    """The fields of Remarks."""


class Scanner:
    """Scans one corpus into a build folder."""

    def __init__(
        self,
        corpus: Path,
        folder: Path,
        sinks: Sequence[Sink],
        key: dict[str, Any],
        *,
        skip_bad: bool,
        passages: Callable[[int], Iterator[Passage]] | None = None,
        repeated: Repeated | None = None,
    ) -> None:
        """`passages` gives the passages from `Passage.end` on; None reads them from the corpus, less those of
        `repeated`."""
        self._passages = passages
        self._repeated = repeated
        self._index_has_some = False
        """Whether a passage was left out that the index has."""
        self._keys = CorpusKeys.of(key.get("settings", {}))
        self._placing = key.get("by") != "add"
        self.corpus = corpus
        self.folder = folder
        self.sinks = sinks
        self.skip_bad = skip_bad
        names = (*_OWN_FILES, *(name for sink in sinks for name in sink.files))
        found = self._resume(key, names)
        if found is None:
            self._clear()
        self.state = found or ScanState(key)
        self._chunk = min((sink.chunk_passages for sink in sinks), default=RunsSink.chunk_passages)
        self._taken = self._chunk * max((sink.together for sink in sinks), default=1)
        self._files: dict[str, BinaryIO] = {}
        for name in names:
            path = folder / name
            path.touch()
            os.truncate(path, self.state.sizes.get(name, 0))
            self._files[name] = path.open("ab")
        if not self.state.sizes:
            self._files[OFFSETS_FILE].write(np.zeros(1, np.uint64).tobytes())
        self._text_end = self.state.sizes.get(TEXT_FILE, 0)
        self._fields_end = self.state.sizes.get(BLOCKS_FILE, 0)
        for sink in sinks:
            sink.open(folder, self._files)

    @property
    def resumed_at(self) -> int:
        """Passages that were already there."""
        return self.state.passages

    def run(self, progress: Callable[[ScanState], None] | None = None) -> ScanState:
        """Scan to the end. Raises UserError for a malformed line (unless skipped), an empty corpus (but not
        one whose passages the index has), or an id that occurs twice."""
        state = self.state
        if not state.read:
            skipped = Skipped(state.skipped, list(state.reasons))
            remarks = Remarks(**state.remarks)
            passages = self._passages(state.position) if self._passages else self._read(skipped)
            while chunk := list(islice(passages, self._taken)):
                if self._passages is None:
                    where = f"{self.corpus}, {self._unit}"
                    for passage in chunk:
                        remarks.see(passage, where)
                    state.remarks = asdict(remarks)
                self._write(chunk)
                state.line = chunk[-1].line
                state.position = chunk[-1].end
                state.passages += len(chunk)
                state.skipped = skipped.count
                state.reasons = skipped.reasons
                self._commit()
                if progress:
                    progress(state)
            state.skipped = skipped.count
            state.reasons = skipped.reasons
            if not state.passages and not self._index_has_some:
                left_out = counted(state.skipped, "line is", "lines are")
                why = f"; {left_out} left out, the first: {state.reasons[0]}" if state.reasons else ""
                raise UserError(f"corpus {self.corpus}: holds no passage{why}")
            state.read = True
            self._commit()
        if not state.done:
            self._refuse_repeated_ids()
            state.done = True
            self._commit()
        for file in self._files.values():
            file.close()
        ids, urls = (np.fromfile(self.folder / name, np.uint64) for name in ("hashes", "urls"))
        write_lookup(self.folder, ids, urls)
        return state

    @cached_property
    def _unit(self) -> str:
        """Of the numbers of passages in messages."""
        return unit_of(self.corpus)

    def _read(self, skipped: Skipped) -> Iterator[Passage]:
        """The passages from where the scan stands. Of those with one id the first is kept, or that which the
        index has."""
        for passage in read_corpus(
            self.corpus,
            skip_bad=self.skip_bad,
            skipped=skipped,
            line=self.state.line,
            start=self.state.position,
            keys=self._keys,
            placing=self._placing,
        ):
            line = self._repeated.kept(passage) if self._repeated is not None else None
            if line is None:
                yield passage
                continue
            self._index_has_some |= line == IN_INDEX
            kept = "that of the index" if line == IN_INDEX else f"that on {self._unit} {line}"
            skipped.add(
                f"{self.corpus}, {self._unit} {passage.line}: id {passage.id!r} again; {kept} is kept"
            )

    def _write(self, taken: list[Passage]) -> None:
        """In chunks of the same passages, however many are taken together: the files are the same bytes."""
        alone = [sink for sink in self.sinks if sink.together == 1]
        for begin in range(0, len(taken), self._chunk):
            chunk = taken[begin : begin + self._chunk]
            self._write_chunk(chunk)
            for sink in alone:
                sink.write([p.contents for p in chunk])
        for sink in self.sinks:
            if sink.together > 1:
                sink.write([p.contents for p in taken])

    def _write_chunk(self, chunk: list[Passage]) -> None:
        files = self._files
        urls = [p.fields.pop("url", None) for p in chunk]
        lines = [encode_document(p.id, p.contents, url) + b"\n" for p, url in zip(chunk, urls, strict=True)]
        ends = self._text_end + np.cumsum([len(line) for line in lines], dtype=np.uint64)
        self._text_end = int(ends[-1])
        files[TEXT_FILE].write(b"".join(lines))
        files[OFFSETS_FILE].write(ends.astype(np.uint64).tobytes())
        files["hashes"].write(np.array([hash_of(p.id) for p in chunk], np.uint64).tobytes())
        hashes = [hash_of(url) if isinstance(url, str) else 0 for url in urls]
        files["urls"].write(np.array(hashes, np.uint64).tobytes())
        fields = [p.fields for p in chunk]
        self._fields_end = write_fields(fields, files[BLOCKS_FILE], files[PLACES_FILE], self._fields_end)
        files["lines"].write(np.array([p.line for p in chunk], np.uint64).tobytes())

    def _commit(self) -> None:
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            self.state.sizes[name] = file.tell()
        write_atomically(self.folder / PROGRESS_FILE, orjson.dumps(asdict(self.state)), durable=True)

    def _clear(self) -> None:
        """What another build left would become a part of this index. First goes what that build would go on
        from, were this one killed here and that one begun again."""
        (self.folder / PROGRESS_FILE).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def _resume(self, key: dict[str, Any], names: Iterable[str]) -> ScanState | None:
        found = hints(self.folder / PROGRESS_FILE)
        if found.keys() != {field.name for field in fields(ScanState)}:  # none, torn, or of another version
            return None
        state = ScanState(**found)
        whole = state.sizes.keys() >= set(names) and all(
            (self.folder / n).exists() and (self.folder / n).stat().st_size >= size
            for n, size in state.sizes.items()
        )
        return state if state.key == key and whole else None

    def _refuse_repeated_ids(self) -> None:
        hashes = np.fromfile(self.folder / "hashes", np.uint64)
        order = np.argsort(hashes, kind="stable")
        same = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
        if not len(same):
            return
        lines = np.fromfile(self.folder / "lines", np.uint64)
        documents = Documents(self.folder / TEXT_FILE, self.folder / OFFSETS_FILE)
        for at in same.tolist():  # equal hashes; ids may differ all the same
            first = int(order[at])
            second = int(order[at + 1])
            identity = documents.get(second)[0]
            if documents.get(first)[0] == identity:
                more = counted(len(same), "passage has", "passages have")
                raise UserError(
                    f"{self.corpus}, {self._unit} {lines[second]}: id {identity!r} again, as on {self._unit} "
                    f"{lines[first]}; expected unique ids; {more} the id of an earlier one: "
                    "--skip-bad keeps the first passage of each id"
                )
