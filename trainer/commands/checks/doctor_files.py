"""Checks of `unspiral doctor --config`: model, questions, corpora and indexes that the configuration names,
as `train` looks for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from retriever_service.index_folder.remarks import no_value_said, placed_said
from services.common.counting import counted, malformed
from services.common.errors import EnvironmentLacks, UserError
from services.common.names import near_path
from services.settings import RetrieverSettings
from trainer.commands.checks.findings import Finding, tried
from trainer.config.schema import Config
from trainer.data import models
from trainer.data.checks.remarks import remarks
from trainer.data.corpora.passages import CorpusReport, validate_corpus
from trainer.data.named_columns import keys_of, named_in, validating
from trainer.data.questions import Report, validate
from trainer.data.relative_paths import paths_of, where_looked
from trainer.lab.demo import lab_name
from trainer.session.preflight import corpora
from trainer.session.preflight.retrievers import check_index, retrievers_of
from trainer.session.preflight.room import check_disk, trained_count

LOOKED_AT = 300_000
"""Rows of a file that are read, which takes some ten seconds; the line says so where it has more."""


def check_files(path: Path, config: Config) -> Iterator[Finding]:
    """What the configuration in `path` names: whether it is there, and questions, passages and indexes what
    they should be."""
    for key, value in paths_of(config).items():
        if key == "model.path":
            yield from _model(path, config, value)
        elif key.endswith(".index"):
            yield _index(path, key, value)
        elif value.startswith("lab:"):
            if isinstance(found := tried(key, value, lab_name, value), Finding):
                yield found
        elif not models.is_there(value):
            hint = near_path(value) + where_looked(path, [value])
            yield Finding(key, "bad", value, f"no such file or folder{hint}")
        elif key.startswith("data.") and Path(value).exists():
            yield _questions_of(config, key, value)
    for key, searched in retrievers_of(config):
        if searched.corpus and Path(searched.corpus).exists():
            yield _corpus_of(key, searched)


def _model(path: Path, config: Config, value: str) -> Iterator[Finding]:
    """A model that is no folder in the right form, whose weights are not whole, or whose checkpoints have no
    room. One that a run fetches or makes is told of no further."""
    folder = Path(value).expanduser()
    if models.is_there(value) and not folder.exists():
        return
    try:
        models.check_trainable(models.check_folder(folder, value), value)
    except UserError as error:
        where = "" if folder.exists() else where_looked(path, [value])
        yield Finding("model.path", "bad", value, str(error).removeprefix(f"model.path {value}: ") + where)
        return
    try:
        check_disk(config, trained_count(config, folder))
    except UserError as torn:
        yield Finding("model.path", "bad", value, str(torn).removeprefix("model.path: "))
    except EnvironmentLacks as lack:
        yield Finding("run.dir", "bad", config.run.dir, str(lack).removeprefix("run.dir: "))


def _index(path: Path, key: str, value: str) -> Finding:
    try:
        check_index(key, value)
    except UserError as error:
        where = "" if Path(value).exists() else where_looked(path, [value])
        return Finding(key, "bad", value, f"{error}{where}")
    return Finding(key, "good", value)


def _questions_of(config: Config, key: str, value: str) -> Finding:
    """Whether the rows of a question file are questions, all of which a run reads."""
    skip_bad = config.data.skip_bad

    def read() -> Report:
        return validate(value, keys=keys_of(config.data, value), most=LOOKED_AT)

    report = tried(key, value, read)
    if isinstance(report, Finding):
        return report
    bad, rows = len(report.problems), len(report.problems) + report.good
    seen = f"{value}: {counted(report.good, 'question')} {_read(rows)}"
    command = validating(value, null_is_empty=config.data.null_is_empty, **named_in(config.data).given)
    lists = f"{command} lists all"
    notes = [said for said, _ in remarks(report)]
    if not bad:
        return Finding(key, "note", seen, "; ".join([*notes, lists])) if notes else Finding(key, "good", seen)
    told = f"{report.problems[0]}; {malformed(bad, rows, whole=rows < LOOKED_AT)}"
    if skip_bad and report.good:
        return Finding(key, "note", seen, "; ".join([f"{told}, left out by data.skip_bad", *notes, lists]))
    out = ["data.skip_bad=true leaves such rows out"] if report.good else []
    return Finding(key, "bad", seen, "; ".join([told, *notes, lists, *out]))


def _corpus_of(key: str, searched: RetrieverSettings) -> Finding:
    """Whether a run can make its index of a corpus, which it reads whole."""
    corpus, keys = str(searched.corpus), corpora.keys_of(searched)

    def read() -> CorpusReport:
        return validate_corpus(Path(corpus), keys=keys, most=LOOKED_AT)

    report = tried(f"{key}.corpus", corpus, read)
    if isinstance(report, Finding):
        return report
    seen = f"{corpus}: {counted(report.good, 'passage')} {_read(report.rows)}"
    if not report.rows:
        return Finding(f"{key}.corpus", "bad", seen, "it is empty")
    told = corpora.unfit(report)
    notes = []
    if report.no_id:
        notes.append(placed_said(report.no_id))
    if report.no_value:
        notes.append(no_value_said(report.no_value))
    lists, *out = corpora.ways_out(key, searched, report)
    if not told:
        if not notes:
            return Finding(f"{key}.corpus", "good", seen)
        return Finding(f"{key}.corpus", "note", seen, "; ".join([*notes, lists]))
    if corpora.left_out(report, searched):
        told[-1] += f", left out by {key}.skip_bad"
        return Finding(f"{key}.corpus", "note", seen, "; ".join([*told, *notes, lists]))
    return Finding(f"{key}.corpus", "bad", seen, "; ".join([*told, *notes, lists, *out]))


def _read(rows: int) -> str:
    """How much was read."""
    return (
        f"in its first {rows:,} rows, which were read" if rows == LOOKED_AT else f"in {counted(rows, 'row')}"
    )
