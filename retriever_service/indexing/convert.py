"""From one dense index to another: smaller or faster types, and published FAISS files into index folders,
with the recall that it costs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from retriever_service.dense.build import convert, recall, sample_queries, stored_bytes
from retriever_service.dense.encoder import Encoder, EncoderSettings, family_of
from retriever_service.dense.search import FOLDER, INDEX_FILE, open_faiss, set_search_effort
from retriever_service.errors import BadSetting, CorpusError, IndexInvalid
from retriever_service.index import IndexInfo, read_info, verify
from retriever_service.indexing.build import Progress, build_folder
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
    queries: str | Path | None = None,
    sample: int = 1000,
    skip_bad: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> tuple[IndexInfo, dict[int, float]]:
    """Make the index `out` of type `kind` from `source`: a dense or hybrid index folder of type Flat, or a
    FAISS file, which needs `corpus`.

    The result is a dense index. Returns its description and the recall at 1, 3 and 10 against the exact
    search: over the questions of `queries` (JSONL with `question`, or one a line; needs the model), else over
    `sample` vectors between stored ones, which is a harder test than questions.
    """
    source, out, tell = Path(source), Path(out), progress or (lambda stage, share, text: None)
    if source.is_dir():
        info = verify(source, corpus)
        if info.settings.get("type") != "Flat":
            kind_of = f"{info.backend} {info.settings.get('type', '')}".strip()
            raise BadSetting(f"index {source}: is {kind_of}; only vectors of type Flat convert")
        flat_path, corpus = source / FOLDER / INDEX_FILE, Path(corpus or info.corpus)
        settings = {name: info.settings[name] for name in ("encoder", "fingerprint")}
        if not corpus.exists():
            raise CorpusError(
                f"corpus {corpus} of index {source}: no such file; give its place with --corpus"
            )
    else:
        if not source.is_file() or corpus is None:
            raise BadSetting(
                f"index {source}: expected an index folder, or a FAISS file together with --corpus"
            )
        flat_path, corpus = source, Path(corpus)
        settings = {
            "encoder": EncoderSettings(model or "", family_of(family, model or "")).as_dict(),
            "fingerprint": None,
        }
    if queries and not (model or settings["encoder"]["model"]):
        raise BadSetting(
            f"--queries {queries}: questions need the encoder; the file {source} does not name it: give --model"
        )
    flat = open_faiss(flat_path)
    vector_bytes = 0 if kind == "Flat" else stored_bytes(flat.d, kind)  # a flat one is linked
    encoder = (
        Encoder(EncoderSettings(**settings["encoder"] | ({"model": model} if model else {})))
        if model or queries
        else None
    )
    if encoder is not None:
        if encoder.dimension != flat.d:
            raise IndexInvalid(
                f"{flat_path}: vectors of {flat.d} numbers, those of {encoder.settings.model} have {encoder.dimension}"
            )
        settings |= {"encoder": encoder.settings.as_dict(), "fingerprint": encoder.fingerprint}
    settings |= {"type": kind, "nprobe": nprobe, "ef_search": ef_search}

    with build_folder(
        corpus,
        out,
        "dense",
        settings,
        by="convert",
        vector_bytes=vector_bytes,
        skip_bad=skip_bad,
        overwrite=overwrite,
        tell=tell,
    ) as build:
        if build is None:
            target = out / FOLDER / INDEX_FILE
        else:
            passages = build.scan([]).passages
            if passages != flat.ntotal:
                raise IndexInvalid(
                    f"{flat_path}: {flat.ntotal} vectors for {passages} passages of {corpus}; it belongs to another corpus"
                )
            target = build.work / FOLDER / INDEX_FILE
            target.parent.mkdir(exist_ok=True)
            if kind == "Flat":
                link_or_copy(flat_path, target)
            else:
                convert(flat_path, target, kind, progress=lambda done, of: tell("vectors", done / of, ""))
            build.seal()
        made = open_faiss(target)
        set_search_effort(made, nprobe, ef_search)
        asked = (
            encoder.queries(read_questions(Path(queries), sample))
            if queries
            else sample_queries(flat, sample)
        )
        measured = {k: recall(flat, made, asked, k) for k in RECALL_AT}
    return read_info(out), measured


def read_questions(path: Path, limit: int) -> list[str]:
    """Questions of a file: records of any layout with a column `question` (or query, problem), or one
    question a line."""
    if not path.is_file():
        raise CorpusError(f"{path}: no such file")
    try:
        found = list(
            islice(_questions_of_lines(path) if _is_text(path) else _questions_of_records(path), limit)
        )
    except ValueError as error:
        raise CorpusError(str(error)) from None
    if not found:
        raise CorpusError(f"{path}: holds no question")
    return found


def _is_text(path: Path) -> bool:
    """Whether each line is a question; one with commas in it looks like the header of a table, but names no
    such column."""
    try:
        kind = layout_of(path)
    except ValueError:
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
            raise ValueError(f"{record.place}: {record.problem}")
        found = field_of(record.fields, QUESTION)
        if found is None or not isinstance(found[1], str):
            raise ValueError(
                f'{record.place}: no "question"; expected records with "question", or one question a line'
            )
        yield found[1].strip()


def link_or_copy(source: Path, target: Path) -> None:
    """The same file at another place, without a copy where the file system can."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def as_percent(measured: dict[int, float]) -> str:
    """The recall for a terminal."""
    return ", ".join(f"@{k} {np.round(100 * share, 2):g} %" for k, share in measured.items())
