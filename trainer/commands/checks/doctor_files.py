"""Checks of `unspiral doctor --config`: model, questions, corpora and indexes that the configuration names,
as `train` looks for them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from retriever_service.index_folder.corpus import read_corpus
from services.common.counting import counted
from services.common.errors import UserError
from trainer.commands.checks.findings import Finding, tried
from trainer.config.schema import Config
from trainer.data import models
from trainer.data.questions import BadRow, parsed
from trainer.data.relative_paths import paths_of, where_looked
from trainer.lab.demo import lab_name
from trainer.session.preflight.retrievers import check_index, keys_of, retrievers_of

LOOKED_AT = 1000
"""Rows of a question file that are read."""


def check_files(path: Path, config: Config) -> Iterator[Finding]:
    """What the configuration in `path` names: whether it is there, and questions, passages and indexes what
    they should be."""
    for key, value in paths_of(config).items():
        if key == "model.path":
            yield from _model(path, value)
        elif key.endswith(".index"):
            yield _index(path, key, value)
        elif value.startswith("lab:"):
            if isinstance(found := tried(key, value, lab_name, value), Finding):
                yield found
        elif not models.is_there(value):
            yield Finding(key, "bad", value, f"no such file or folder{where_looked(path, [value])}")
        elif key.startswith("data.") and Path(value).exists():
            yield _questions_of(key, value, config.data.skip_bad)
    for key, searched in retrievers_of(config):
        if searched.corpus and Path(searched.corpus).exists():
            rows = read_corpus(searched.corpus, skip_bad=searched.skip_bad, keys=keys_of(searched))
            if isinstance(first := tried(f"{key}.corpus", searched.corpus, next, rows, None), Finding):
                yield first


def _model(path: Path, value: str) -> Iterator[Finding]:
    """A model that is no folder in the right form. One that a run fetches or makes is told of no further."""
    folder = Path(value).expanduser()
    if models.is_there(value) and not folder.exists():
        return
    try:
        models.check_folder(folder, value)
    except UserError as error:
        where = "" if folder.exists() else where_looked(path, [value])
        yield Finding("model.path", "bad", value, str(error).removeprefix(f"model.path {value}: ") + where)


def _index(path: Path, key: str, value: str) -> Finding:
    try:
        check_index(key, value)
    except UserError as error:
        where = "" if Path(value).exists() else where_looked(path, [value])
        return Finding(key, "bad", value, f"{error}{where}")
    return Finding(key, "good", value)


def _questions_of(key: str, value: str, skip_bad: bool) -> Finding:
    """Whether the first rows of a question file are questions."""
    rows = tried(key, value, lambda: list(islice(parsed(Path(value)), LOOKED_AT)))
    if isinstance(rows, Finding):
        return rows
    bad = [row for row in rows if isinstance(row, BadRow)]
    seen = f"{value}: {counted(len(rows) - len(bad), 'question')} in {counted(len(rows), 'row')}"
    if len(rows) == LOOKED_AT:
        seen += " at its start"
    if not bad and rows:
        return Finding(key, "good", seen)
    why = f"{bad[0]}; unspiral data validate {value} lists all" if bad else "it is empty"
    return Finding(key, "note" if skip_bad and len(bad) < len(rows) else "bad", seen, why)
