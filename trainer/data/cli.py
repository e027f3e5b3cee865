"""Commands on questions, corpora and known models: `data validate|convert|passages`, `model fetch`."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from retriever_service.cli import IdKey, NullIsEmpty, TextKey, TitleKey
from retriever_service.index_folder.keys import NO_KEYS as NO_CORPUS_KEYS
from retriever_service.index_folder.keys import CorpusKeys
from retriever_service.settings import ServerSettings
from services.common import hub
from services.common.counting import counted, left_out
from services.common.errors import UserError
from services.common.loading.lazy import LazyModule
from services.common.printing.completed import kept_in
from services.common.printing.console import Console
from services.common.printing.harmless import harmless
from services.common.printing.help_pages import INDEX, REPLACES
from services.common.progress import progress_on
from services.common.records.columns import NULL_IS_EMPTY
from services.common.users_files import given_as, one_out, refuse_to_replace
from services.contracts import Question
from trainer.config.schema import Config, load_config
from trainer.data.checks import findings
from trainer.data.checks.lines import ODDLY, last_line, say_findings, say_first
from trainer.data.checks.near_top import refuse_without_questions
from trainer.data.checks.overlap import NEAR, Against, twins
from trainer.data.columns import Keys
from trainer.data.convert import convert
from trainer.data.corpora import documents
from trainer.data.models import aside, fetch
from trainer.data.named_columns import keys_of
from trainer.data.questions import BadRow, parsed, validate
from trainer.data.relative_paths import looked_for

if TYPE_CHECKING:
    from retriever_service.index_folder import corpus, remarks
    from retriever_service.search import backends
    from trainer.data import prompts
    from trainer.data.checks import coverage
    from trainer.data.corpora import passages
else:  # numba, transformers and httpx take seconds
    backends = LazyModule("retriever_service.search.backends")
    corpus = LazyModule("retriever_service.index_folder.corpus")
    remarks = LazyModule("retriever_service.index_folder.remarks")
    coverage = LazyModule("trainer.data.checks.coverage")
    passages = LazyModule("trainer.data.corpora.passages")
    prompts = LazyModule("trainer.data.prompts")

data_app = typer.Typer(help="Check and convert questions and corpora.", no_args_is_help=True)
model_app = typer.Typer(
    help="Small models whose weights come in Python packages, and the papers' checkpoints.",
    no_args_is_help=True,
)

QuestionKey = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="Column of the question, if it has a name of its own.")
]
AnswerKey = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="Column of the answers, or a key in one, such as metadata.answer."),
]
SourceKey = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="Column of the data source that a question is of.")
]
QuestionIdKey = Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the questions' ids.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help=REPLACES)]
Out = Annotated[Path | None, typer.Option(help="The same as DST.")]


@data_app.command("validate")
def validate_command(
    path: Annotated[
        Path, typer.Argument(help="Questions or corpus: file or folder, of any layout in docs/data.md.")
    ],
    against: Annotated[
        Path | None,
        typer.Option(
            help="Questions that must not stand in PATH, such as the training set's. Lists those that do."
        ),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(help=f"{INDEX}: count the questions whose answer stands in its best passages."),
    ] = None,
    topk: Annotated[int, typer.Option(min=1, help="With --index: best passages that are looked at.")] = 3,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="With an --index that is a function: most calls at a time. Default: that of --config, or 1.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Configuration: show a prompt of its model, and count what is too long or cut."),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, help="With --index and --config: the first N questions are looked at.")
    ] = 2000,
    question_key: QuestionKey = None,
    answer_key: AnswerKey = None,
    source_key: SourceKey = None,
    text_key: TextKey = None,
    title_key: TitleKey = None,
    id_key: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of the ids, of passages or questions.")
    ] = None,
    null_is_empty: NullIsEmpty = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="One JSON object in place of the lines, with all rows told of."),
    ] = False,
) -> None:
    """Read every row and count the questions of each data source, or the passages of a corpus. Malformed rows
    are listed, and make the exit status 2; so do questions of --against. The keys of a question count in both
    files, where their column is there, and those of a passage say that PATH is a corpus."""
    keys = Keys(question_key, answer_key, source_key, null_is_empty=null_is_empty)
    of_corpus = CorpusKeys(text_key, title_key, null_is_empty=null_is_empty)
    if of_corpus and keys:
        raise UserError(
            "data validate: --text-key and --title-key are of a corpus; --question-key, --answer-key and "
            "--source-key are of questions"
        )
    path = hub.local_file("data validate", path, aside)
    if keys or (not of_corpus and passages.asks_and_answers(path)):
        keys = replace(keys, id=id_key)
    else:
        of_corpus = replace(of_corpus, id=id_key)
    if of_corpus or (not keys and passages.is_corpus(path)):
        if index or config or against:
            raise UserError(f"{path}: is a corpus; --index, --config and --against go with questions")
        with _told(as_json) as told:
            _validate_corpus(path, told, of_corpus)
        return
    settings = load_config(config) if config else None
    if settings and not keys:
        keys = keys_of(settings.data, path)
        keys = replace(keys, null_is_empty=keys.null_is_empty or null_is_empty)
    if against is not None:
        refuse_without_questions("--against", against, keys)
    with nullcontext() if against is None else given_as("--against", against):
        named = keys if against is None else keys.beside(path, against)
    with _told(as_json) as told:
        with progress_on(Console(stderr=True)) as tell:
            rows = _expected(path)
            report = validate(
                path, keys=named, on_rows=lambda n: tell("read", min(1.0, n / rows), f"{n:,} questions")
            )
        told |= findings.of_questions(path, report)
        say_findings(report, named)
        same = _list_twins(path, against, keys, told) if against is not None and report.good else 0
        if report.good and (index or settings):
            with looked_for(config, settings) if config and settings else nullcontext():
                at_once = concurrency or (settings.retriever.concurrency if settings else 1)
                _look_up(path, named, index, topk, limit, settings, told, at_once)
        if report.problems:
            raise UserError(f"{path}: {last_line(report)}")
        if same:
            raise UserError(f"{path}: {same:,} of {report.good:,} questions stand in {against} too")


@contextmanager
def _told(as_json: bool) -> Iterator[dict[str, Any]]:
    """What is found inside goes into the dict, which is printed at the end, in place of the lines; also where
    the findings are an error, whose line and exit status stay as they are."""
    found: dict[str, Any] = {}
    try:
        with redirect_stdout(io.StringIO()) if as_json else nullcontext():
            yield found
    finally:
        if as_json and found:
            typer.echo(json.dumps(found, indent=1))


def _expected(path: Path) -> int:
    """About how many rows there are, for progress."""
    try:
        return corpus.estimate(path)[1]
    except UserError:  # the reading says what is wrong
        return 1


def _validate_corpus(path: Path, told: dict[str, Any], keys: CorpusKeys = NO_CORPUS_KEYS) -> None:
    with progress_on(Console(stderr=True)) as tell:
        rows = _expected(path)
        report = passages.validate_corpus(
            path, lambda n: tell("read", min(1.0, n / rows), f"{n:,} passages"), keys
        )
    told |= findings.of_corpus(path, report)
    only_one = report.malformed == 1 and report.passages
    first = 0 if report.passages else 1  # where no row is well, the last line tells the first one
    for line in (*report.problems[first:], *report.notes):
        typer.echo(harmless(line))
    typer.echo(f"{path}: a corpus of {counted(report.passages, 'passage')}")
    if report.numbered and keys:
        typer.echo("its rows have no ids and are numbered from 0; --id-key names a column of ids")
    elif report.numbered:
        typer.echo(
            "its rows have no ids and are numbered from 0; if they are questions, name their columns by "
            "--question-key and --answer-key"
        )
    if others := remarks.other_columns(path, keys):
        typer.echo(others)
    if report.no_id:
        typer.echo(remarks.placed_said(report.no_id))
    if report.no_value:
        said = remarks.no_value_said(report.no_value)
        typer.echo(f"{said}; {NULL_IS_EMPTY.format('retriever')}")
    for count, what in (
        (report.empty, ("passage is empty", "passages are empty")),
        (report.title_alone, ("passage has a title and no text", "passages have a title and no text")),
        (report.odd, (f"passage looks {ODDLY}", f"passages look {ODDLY}")),
        (
            report.long,
            (
                f"passage has more than {passages.LONG} words",
                f"passages have more than {passages.LONG} words",
            ),
        ),
        (report.same_texts, ("passage has the text of another one", "passages have the text of another one")),
    ):
        if count:
            typer.echo(counted(count, *what))
    if report.long:
        typer.echo(
            "a search result is cut at rollout.max_obs_tokens: `unspiral data passages` divides long texts"
        )
    if wrong := report.count_line if only_one else report.total_line:
        out = "; `index build --skip-bad` leaves these out" if report.good else ""
        raise UserError(f"{path}: {wrong}{out}")


def _look_up(
    path: Path,
    keys: Keys,
    index: str | None,
    topk: int,
    limit: int,
    config: Config | None,
    told: dict[str, Any],
    concurrency: int,
) -> None:
    """Print what the agent would be shown of the first questions, and whether their answers can be found."""
    rows = [
        (item[1].question, coverage.hops_of(item[0].fields or {}))
        for item in islice(
            (one for one in parsed(path, all_columns=True, keys=keys) if not isinstance(one, BadRow)), limit
        )
    ]
    shown = prompts.Prompts(config) if config else None
    if index is None:
        for question, _ in rows:
            shown.add(question) if shown else None
    else:
        settings = ServerSettings(index=index, concurrency=concurrency)
        backends.check_settings(settings)
        opened = backends.open_index(settings)
        with progress_on(Console(stderr=True)) as tell:

            def on_batch(done: int, found: list[tuple[Question, list[dict[str, Any]]]]) -> None:
                tell("search", done / len(rows), f"{done:,} questions")
                for question, held in found:
                    shown.add(question, held) if shown else None

            result = coverage.coverage(rows, opened, topk, on_batch)
        opened.close()
        told["index"] = findings.of_coverage(index, result)
        for line in coverage.lines(result, index):
            typer.echo(line)
    if shown:
        lengths = {"prompt_tokens": shown.shown.prompts, "search_tokens": shown.shown.observations}
        told["prompts"] = {"first": shown.shown.first, **lengths}
        typer.echo(f"the first prompt:\n{harmless(shown.shown.first)}")
        for line in shown.shown.lines():
            typer.echo(line)


def _list_twins(path: Path, against: Path, keys: Keys, told: dict[str, Any]) -> int:
    """Print the questions that are in both files, or nearly; how many are the same."""
    read = Against()
    with given_as("--against", against):
        found = twins(path, against, read, keys)
    told["against"] = findings.of_twins(against, read, found)
    same = [twin for twin in found if twin.similarity == 1]
    near = [twin for twin in found if twin.similarity < 1]
    say_first([f"same: {twin.place} and {twin.other_place}: {twin.question.text}" for twin in same])
    say_first(
        [
            f"near ({twin.similarity:.2f}): {twin.place}: {twin.question.text} | {twin.other_place}: "
            f"{twin.other.text}"
            for twin in near
        ]
    )
    if read.unread:
        rows = f"{len(read.unread):,} of its {counted(read.rows, 'row')}"
        typer.echo(f"{against}: {rows} could not be compared, the first: {read.unread[0]}")
    agree = sum(twin.answers_agree for twin in near)
    typer.echo(
        f"against {against}: {counted(len(same), 'question is', 'questions are')} the same, "
        f"{len(near):,} near "
        f"(at least {NEAR:.0%} of the words; {agree:,} of these with an answer in common)"
    )
    return len(same)


@data_app.command("convert")
def convert_command(
    src: Annotated[
        Path, typer.Argument(help="Question file or folder to read, of any layout in docs/data.md.")
    ],
    dst: Annotated[
        Path | None,
        typer.Argument(help="File to write: .parquet (Search-R1), .jsonl or .jsonl.gz (FlashRAG)."),
    ] = None,
    out: Out = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave malformed rows out and count them.")
    ] = False,
    question_key: QuestionKey = None,
    answer_key: AnswerKey = None,
    source_key: SourceKey = None,
    id_key: QuestionIdKey = None,
    null_is_empty: NullIsEmpty = False,
    overwrite: Overwrite = False,
) -> None:
    """Write questions in another format, by the file's ending; `data passages` writes corpora."""
    dst = one_out("data convert", dst, out)
    refuse_to_replace(str(dst), dst, overwrite, src)
    done = convert(
        hub.local_file("data convert", src, aside),
        dst,
        skip_bad=skip_bad,
        keys=Keys(question_key, answer_key, source_key, id_key, null_is_empty),
    )
    typer.echo(f"{counted(len(done.rows), 'question')} written to {dst}")
    _say_left_out(done.skipped, done.reasons)


@data_app.command("passages")
def passages_command(
    src: Annotated[
        Path,
        typer.Argument(
            help="Documents: a file or folder of .txt, .md or .rst; or rows with a text, of any layout in "
            "docs/data.md."
        ),
    ],
    dst: Annotated[Path | None, typer.Argument(help="File to write, JSON Lines.")] = None,
    out: Out = None,
    words: Annotated[int, typer.Option(min=10, help="Most words of a passage.")] = 100,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out what cannot be read and count it.")
    ] = False,
    text_key: TextKey = None,
    title_key: TitleKey = None,
    id_key: IdKey = None,
    null_is_empty: NullIsEmpty = False,
    overwrite: Overwrite = False,
) -> None:
    """Write documents of your own as a corpus of passages. Each passage has whole paragraphs, as far as they
    fit, with the document's title and heading; rows without an id get one, and so do those with the id of an
    earlier one."""
    dst = one_out("data passages", dst, out)
    refuse_to_replace(str(dst), dst, overwrite, src)
    keys = CorpusKeys(text_key, title_key, id_key, null_is_empty)
    made = documents.write_passages(src, dst, words=words, skip_bad=skip_bad, keys=keys)
    for lines in ([f"{place}: no text" for place in made.empty], made.left_out, made.no_value, made.renamed):
        say_first(lines)
    kind = "document" if made.of_documents else "row"
    lengths = sorted(made.words)
    typer.echo(
        f"{counted(made.passages, 'passage')} of {counted(made.documents, kind)} written to {dst}: "
        f"{lengths[len(lengths) // 2]} words at the median, {lengths[-1]} at most"
    )
    if made.no_value:
        said = remarks.no_value_said(len(made.no_value), "row")
        typer.echo(f"{said}, which tables hold where there is nothing")
    if made.renamed:
        got = (
            "row has the id of an earlier one and got another",
            "rows have the id of an earlier one and got others",
        )
        typer.echo(counted(len(made.renamed), *got))
    _say_left_out(len(made.bad), made.bad, kind)


def _say_left_out(count: int, reasons: Sequence[str], one: str = "row") -> None:
    """Rows that --skip-bad left out, as `index build` tells them."""
    for line in left_out(count, "malformed", reasons, one=one):
        typer.echo(harmless(line), err=True)


@model_app.command("fetch")
def fetch_command(
    name: Annotated[
        str,
        typer.Argument(autocompletion=kept_in("trainer.data.models:KNOWN"), help="A name of `model list`."),
    ],
) -> None:
    """Convert a known model to a Hugging Face folder in the cache, if it is not there yet, and print its
    path. A paper's checkpoint is downloaded from the hub."""
    typer.echo(fetch(name, say=lambda text: typer.echo(text, err=True)))
