"""Corpora, of which a run makes an index after Ray has started: a malformed row is told before."""

from __future__ import annotations

import time
from pathlib import Path

from retriever_service.index_folder.keys import CorpusKeys
from services.common.counting import counted, malformed
from services.common.errors import UserError
from services.settings import RetrieverSettings
from trainer.data.corpora.passages import CorpusReport, validate_corpus
from trainer.data.named_columns import validating

READ_SECONDS = 5.0
"""Longest reading of a corpus before Ray starts: some hundred thousand passages. The build reads them all."""


def keys_of(settings: RetrieverSettings) -> CorpusKeys:
    """Columns of the corpus that the configuration names."""
    return CorpusKeys(settings.text_key, settings.title_key, settings.id_key, settings.null_is_empty)


def check_corpus(key: str, settings: RetrieverSettings) -> None:
    """Raises UserError where a run could make no index of its corpus, as far as READ_SECONDS of reading
    show, in the words of `unspiral doctor`."""
    if not settings.corpus or not Path(settings.corpus).exists():  # a name of the laboratory or the hub
        return
    until = time.monotonic() + READ_SECONDS
    try:
        report = validate_corpus(Path(settings.corpus), keys=keys_of(settings), until=until)
    except UserError as e:
        raise UserError(f"{key}.corpus: {e}") from None
    if not report.rows and report.whole:
        raise UserError(f"{key}.corpus: {settings.corpus}: it is empty")
    told = unfit(report)
    if told and not left_out(report, settings):
        raise UserError(f"{key}.corpus: {'; '.join([*told, *ways_out(key, settings, report)])}")


def unfit(report: CorpusReport) -> list[str]:
    """What keeps an index from being made of all rows, in words: the first row that is malformed, how many
    are, and how many have an id that stands before."""
    told = []
    if report.malformed:
        told += [report.problems[0], malformed(report.malformed, report.rows, whole=report.whole)]
    if report.same_ids:
        told.append(counted(report.same_ids, "row has", "rows have") + " the id of an earlier one")
    return told


def left_out(report: CorpusReport, settings: RetrieverSettings) -> bool:
    """Whether the build leaves such rows out. It refuses a corpus of which nothing would stay."""
    return settings.skip_bad and bool(report.good or not report.whole)


def ways_out(key: str, settings: RetrieverSettings, report: CorpusReport) -> list[str]:
    """The command that lists all such rows, and the setting that leaves them out."""
    keys = keys_of(settings)
    command = validating(str(settings.corpus), null_is_empty=keys.null_is_empty, **keys.given)
    lists = f"{command} lists all"
    return [lists, *([f"{key}.skip_bad=true leaves such rows out"] if report.good else [])]
