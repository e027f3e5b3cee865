"""From one dense index to another: smaller or faster types, and published FAISS files into index folders,
with the recall that it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from retriever_service.dense.build import (
    convert,
    recall,
    rescored_recall,
    sample_queries,
    stored_bytes,
    write_rescored,
)
from retriever_service.dense.encoder import Encoder, EncoderSettings, family_of
from retriever_service.dense.exact import DTYPES, ExactVectors
from retriever_service.dense.exact import FILE as EXACT_FILE
from retriever_service.dense.search import FOLDER, INDEX_FILE, open_faiss, set_search_effort
from retriever_service.errors import IndexInvalid
from retriever_service.index_folder.description import IndexInfo, IndexSettings, verify
from retriever_service.indexing.build import Build, Plan, make_index, silent
from retriever_service.indexing.parts import Progress
from services.common.errors import UserError
from services.common.files import link_or_copy
from services.common.names import accepted, near_path
from services.common.records import field_of, layout_of, open_unpacked, plain_name, read_records
from services.common.records.columns import QUESTION

RECALL_AT = (1, 3, 10)


def convert_index(
    source: str | Path,
    out: str | Path,
    kind: str,
    *,
    corpus: str | Path | None = None,
    model: str | None = None,
    family: str | None = None,
    nprobe: int | None = None,
    ef_search: int | None = None,
    rescore: int = 0,
    rescore_dtype: str = "float16",
    queries: str | Path | None = None,
    sample: int = 1000,
    skip_bad: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> tuple[IndexInfo, dict[int, float]]:
    """Make the index `out` of type `kind` from `source`: a dense or hybrid index folder of type Flat, or a
    FAISS file, which needs `corpus`.

    With `rescore` the index keeps the vectors too, as `rescore_dtype`: `rescore` candidates for each passage
    asked for are scored again by them. Types of inverted lists (`IVF,...`) are then made in bounded memory,
    and a conversion that was killed goes on where it was.

    The result is a dense index. Returns its description and the recall at 1, 3 and 10 against the exact
    search: over the questions of `queries` (JSONL with `question`, or one per line; needs the model), or over
    `sample` vectors between stored ones, which is a harder test than questions.
    """
    form = _Form(kind, nprobe, ef_search, rescore, rescore_dtype)
    source = Path(source)
    given = Path(corpus) if corpus else None
    exact = _of_folder(source, given) if source.is_dir() else _of_file(source, given, model, family)
    if queries and not (model or exact.encoder.model):
        raise UserError(
            f"--queries {queries}: questions need the encoder; the file {source} does not name it: give "
            "--model"
        )
    questions = read_questions(Path(queries), sample) if queries else []
    # Open before the index is made: with `overwrite` the index may take the place of its own source.
    flat = open_faiss(exact.vectors)
    settings: IndexSettings = {"encoder": exact.encoder.as_dict(), "fingerprint": exact.fingerprint}
    encoder = _encoder_for(exact, model, flat.d) if model or queries else None
    if encoder:
        settings = {"encoder": encoder.settings.as_dict(), "fingerprint": encoder.fingerprint}
    plan = Plan(
        corpus=exact.corpus,
        out=Path(out),
        backend="dense",
        settings=settings | form.settings(),
        by="convert",
        vector_bytes=form.bytes_of_a_vector(flat.d),
        skip_bad=skip_bad,
        overwrite=overwrite,
        tell=progress or silent,
    )

    def note(done: int, of: int) -> None:
        plan.tell("vectors", done / of, "")

    def write(build: Build) -> None:
        passages = build.scan([]).passages
        if passages != flat.ntotal:
            raise IndexInvalid(
                f"{exact.vectors}: {flat.ntotal} vectors for {passages} passages of {exact.corpus}; it "
                "belongs to another corpus"
            )
        form.write(exact.vectors, build.work, note)

    measured: dict[int, float] = {}

    def measure(folder: Path) -> None:
        asked = encoder.queries(questions) if encoder and questions else sample_queries(flat, sample)
        measured.update(form.recall(folder, flat, asked))

    return make_index(plan, write, measure), measured


@dataclass(frozen=True)
class _Form:
    """What an index is converted to."""

    kind: str
    nprobe: int | None
    ef_search: int | None
    rescore: int
    """Candidates for each passage that are scored again by the vectors; 0: the index keeps no vectors."""
    rescore_dtype: str

    def settings(self) -> IndexSettings:
        """Of the new index, beside its encoder's. Raises UserError."""
        made: IndexSettings = {"type": self.kind, "nprobe": self.nprobe, "ef_search": self.ef_search}
        if not self.rescore:
            return made
        if self.rescore_dtype not in DTYPES:
            raise UserError(f"rescore_dtype {self.rescore_dtype!r}: {accepted(self.rescore_dtype, DTYPES)}")
        return made | {"rescore": self.rescore, "rescore_dtype": self.rescore_dtype}

    def bytes_of_a_vector(self, dimension: int) -> int:
        """On the disk, while the index is made."""
        stored = 0 if self.kind == "Flat" else stored_bytes(dimension, self.kind)  # a flat one is linked
        if not self.rescore:
            return stored
        # The lists of the blocks and the merged ones lie on the disk together for a while.
        return 2 * stored + np.dtype(self.rescore_dtype).itemsize * dimension

    def write(self, vectors: Path, work: Path, note: Callable[[int, int], None]) -> None:
        """The index of exact vectors, into the folder in which it is built."""
        target = work / FOLDER / INDEX_FILE
        target.parent.mkdir(exist_ok=True)
        if self.kind == "Flat":
            link_or_copy(vectors, target)
        elif self.rescore:
            write_rescored(vectors, work, self.kind, self.rescore_dtype, note)
        else:
            convert(vectors, target, self.kind, progress=note)

    def recall(self, folder: Path, flat: Any, asked: np.ndarray) -> dict[int, float]:
        """Of the index in a folder, against the exact one, at each of RECALL_AT."""
        made = open_faiss(folder / FOLDER / INDEX_FILE)
        set_search_effort(made, self.nprobe, self.ef_search)
        if not self.rescore:
            return {k: recall(flat, made, asked, k) for k in RECALL_AT}
        vectors = ExactVectors(folder / FOLDER / EXACT_FILE, self.rescore_dtype, flat.d, flat.ntotal)
        return {k: rescored_recall(flat, made, vectors, asked, k, self.rescore) for k in RECALL_AT}


@dataclass(frozen=True)
class _Exact:
    """Exact vectors, and what is known of them."""

    vectors: Path
    """A FAISS file of type Flat."""
    corpus: Path
    encoder: EncoderSettings
    """Its `model` is empty where nothing names it."""
    fingerprint: str | None


def _encoder_for(exact: _Exact, model: str | None, dimension: int) -> Encoder:
    """The encoder of the vectors, by `model` where that is given. Raises IndexInvalid where its vectors have
    another number of dimensions."""
    encoder = Encoder(replace(exact.encoder, model=model) if model else exact.encoder)
    if encoder.dimension != dimension:
        raise IndexInvalid(
            f"{exact.vectors}: vectors of {dimension} numbers, those of {encoder.settings.model} have "
            f"{encoder.dimension}"
        )
    return encoder


def _of_folder(source: Path, corpus: Path | None) -> _Exact:
    info = verify(source, corpus)
    if info.settings.get("type") != "Flat":
        kind_of = f"{info.backend} {info.settings.get('type', '')}".strip()
        raise UserError(f"index {source}: is {kind_of}; only vectors of type Flat convert")
    found = corpus or Path(info.corpus)
    if not found.exists():
        raise UserError(f"corpus {found} of index {source}: no such file; give its place with --corpus")
    encoder = EncoderSettings(**info.settings["encoder"])
    return _Exact(source / FOLDER / INDEX_FILE, found, encoder, info.settings["fingerprint"])


def _of_file(source: Path, corpus: Path | None, model: str | None, family: str | None) -> _Exact:
    if not source.is_file() or corpus is None:
        raise UserError(f"index {source}: expected an index folder, or a FAISS file together with --corpus")
    return _Exact(source, corpus, EncoderSettings(model or "", family_of(family, model or "")), None)


def read_questions(path: Path, limit: int) -> list[str]:
    """Questions of a file: records of any layout with a column `question` (or query, problem), or one
    question a line."""
    if not path.is_file():
        raise UserError(f"{path}: no such file{near_path(path)}")
    found = list(islice(_questions_of_lines(path) if _is_text(path) else _questions_of_records(path), limit))
    if not found:
        raise UserError(f"{path}: holds no question")
    return found


def _is_text(path: Path) -> bool:
    """Whether each line is a question; one with commas in it looks like the header of a table, but names no
    such column."""
    try:
        kind = layout_of(path)
    except UserError:
        return True
    if kind.format != "table":
        return False
    with open_unpacked(path) as file:
        header = file.readline().decode(kind.encoding, "replace")
    return not {plain_name(name.strip(' "\r\n')) for name in header.split(kind.delimiter)} & {*QUESTION}


def _questions_of_lines(path: Path) -> Iterator[str]:
    with open_unpacked(path) as file:
        lines = (line.decode("utf-8", "replace").strip() for line in file)
        yield from (line for line in lines if line)


def _questions_of_records(path: Path) -> Iterator[str]:
    for record in read_records(path):
        if record.fields is None:
            raise UserError(f"{record.place}: {record.problem}")
        found = field_of(record.fields, QUESTION)
        if found is None or not isinstance(found[1], str):
            raise UserError(
                f'{record.place}: no "question"; expected records with "question", or one question a line'
            )
        yield found[1].strip()


def as_percent(measured: dict[int, float]) -> str:
    """The recall for a terminal."""
    return ", ".join(f"@{k} {np.round(100 * share, 2):g} %" for k, share in measured.items())
