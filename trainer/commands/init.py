"""`unspiral init`: a commented configuration that fits the machine. The sizes are those of docs/gpu.md."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from retriever_service.addresses import check_address
from retriever_service.cli import IdKey, NullIsEmpty, TextKey, TitleKey
from retriever_service.index_folder.keys import NO_KEYS as NO_CORPUS_KEYS
from retriever_service.index_folder.keys import CorpusKeys
from retriever_service.index_folder.remarks import no_value_said, other_columns, placed_said
from retriever_service.search.users_index import load_search
from services.common.counting import counted
from services.common.errors import UserError
from services.common.files import write_atomically
from services.common.loading.user_code import is_import_path, with_colon
from services.common.names import near_path
from services.common.printing.commands import typed
from services.common.printing.completed import kept_in
from services.common.printing.help_pages import CORPUS, INDEX, REPLACES
from services.common.records.columns import NULL_IS_EMPTY
from services.common.users_files import refuse_to_lose, refuse_to_replace
from trainer.config.schema import load_config
from trainer.data.checks.overlap import twins
from trainer.data.checks.remarks import remarks
from trainer.data.cli import AnswerKey, QuestionIdKey, QuestionKey, SourceKey
from trainer.data.columns import Keys
from trainer.data.corpora.passages import validate_corpus
from trainer.data.models import is_there, resolve
from trainer.data.named_columns import validating
from trainer.data.questions import NO_KEYS, validate
from trainer.lab import demo as _lab  # noqa: F401  # registers the names of its models and files (lab:0)
from trainer.session.preflight.retrievers import check_index
from trainer.session.preflight.sizes import parameter_count, parameters_by_config

LARGE = 1.0e9
"""Parameters from which a model trains with checkpointed activations."""
CARD_GB, ROOM_GB, DIVIDED_ROOM_GB = 80, 64, 48
"""What a card is taken to have, and what weights, gradients and optimiser may take of it: of one rank, and of
one of several, which gathers layers whole beside them. Activations and buffers need the rest."""
ONE_RANK, DIVIDED, OFFLOADED, WEIGHTS = 20, 18, 6, 2
"""Bytes per parameter by docs/gpu.md: of one rank, of all ranks of ZeRO 3 together, of one rank without its
optimiser, and of the weights alone."""

LOOKED_AT = 100_000
"""Rows of a corpus that are read: some seconds."""
PART_MARKS = [
    "reward:",
    "  kind: format      # part marks: a small model has little right",
    "  right_at: 0.8      # of format: a right answer in a wrong form earns 0.8. With another kind: delete",
]


@dataclass(frozen=True)
class Fit:
    """The settings that depend on the machine, as lines of YAML."""

    learner: list[str]
    rollout: list[str]


def fit(parameters: int, gpus: int) -> Fit:
    """What docs/gpu.md advises for so many parameters on so many GPUs; 0 is a machine without one."""
    if gpus == 0:
        return Fit(
            ["lr: 1.0e-5      # high: three steps are to show something", "tokens_per_microbatch: 2048"],
            [
                "workers: 1",
                "kv_cache_gib: 0.5      # memory of the engine's cache",
                "max_turns: 2      # these five are small, so that a step ends in minutes",
                "max_prompt_tokens: 512",
                "max_response_tokens: 128      # of a turn",
                "max_obs_tokens: 256      # of a search's documents",
                "max_model_tokens: 1408      # of all: prompt, 3 x response, 2 x observation",
            ],
        )
    learner = ["lr: 1.0e-6"]
    rollout = ["workers: 1" if gpus <= 2 else "workers: all      # each GPU that the learner leaves"]
    learner.append(f"tokens_per_microbatch: {32768 if parameters < LARGE else 16384}")
    if parameters >= LARGE:
        learner.append("gradient_checkpointing: true      # less memory, a third more computing")
    ranks = ranks_needed(parameters)
    # In turns the engine needs the other half of the card; otherwise as many cards are left for the workers.
    in_turns = OFFLOADED * parameters <= ROOM_GB / 2 * 1e9
    if not (in_turns if gpus == 1 else ranks == 1 or gpus >= 2 * ranks):
        learner[0] = "lr: 1.0e-5      # adapters take a higher rate"
        why = f"all weights of this size need {2 * ranks} GPUs of {CARD_GB} GB"
        learner.append(f"lora: {{rank: 16, alpha: 32}}      # {why}")
        if WEIGHTS * parameters > ROOM_GB * 1e9:
            held = f"{WEIGHTS * parameters / 1e9:.0f} GB"
            learner.append(f"# its weights alone are {held}, more than such a card has room for")
    elif ranks > 1 and gpus > 1:
        learner += [
            f"ranks: {ranks}      # {DIVIDED * parameters / ranks / 1e9:.0f} GB on each, and activations",
            "zero_stage: 3      # weights, gradients and optimiser divided over ranks",
        ]
    elif gpus >= 8:
        learner.append(f"ranks: {gpus // 4}")
    if gpus == 1:
        learner.append("offload_optimizer: true      # the card is shared with the engine")
        rollout += ["share_gpus: true      # learner and engine take turns", "gpu_memory_utilization: 0.5"]
    return Fit(learner, rollout)


def ranks_needed(parameters: int) -> int:
    """Learner ranks on which all weights of a model are trained: 1, or as many as ZeRO 3 needs."""
    if ONE_RANK * parameters <= ROOM_GB * 1e9:
        return 1
    ranks = 2
    while DIVIDED * parameters / ranks > DIVIDED_ROOM_GB * 1e9:
        ranks *= 2
    return ranks


def text_of(
    parameters: int,
    gpus: int,
    *,
    model: str,
    data: str,
    held_out: str | None,
    source: str,
    keys: Keys = NO_KEYS,
    columns: CorpusKeys = NO_CORPUS_KEYS,
    skip_bad: bool = False,
) -> str:
    """The configuration. source: the retriever's line, such as `corpus: F`. keys, columns: of questions and
    of the corpus, where they have names of their own. skip_bad: leave malformed rows of both out."""
    machine = fit(parameters, gpus)
    where = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "CPU"
    lines = [
        f"# Made by `unspiral init` for {parameters / 1e9:.2f} B parameters on {where}.",
        "# `unspiral config explain` describes every key; those that are not here keep their defaults.",
        "run:",
        "  name: first      # the run's files go to runs/first",
        "model:",
        f"  path: {_quoted(model)}",
        "data:",
        f"  train: {_quoted(data)}",
        *([f"  eval: {_quoted(held_out)}      # never trained on"] if held_out else []),
        *(f"  {name}_key: {_quoted(column)}" for name, column in keys.given.items()),
        *(["  null_is_empty: true      # cells such as NULL or nan"] if keys.null_is_empty else []),
        *(["  skip_bad: true      # malformed rows are left out and counted"] if skip_bad else []),
        "retriever:",
        f"  {source}",
        *(f"  {name}_key: {_quoted(column)}" for name, column in columns.given.items()),
        *(["  null_is_empty: true"] if columns.null_is_empty and source.startswith("corpus") else []),
        *(["  skip_bad: true"] if skip_bad and source.startswith("corpus") else []),
        "rollout:",
        *(f"  {line}" for line in machine.rollout),
        f"  prompts_per_step: {16 * max(1, gpus // 4) if gpus else 4}",
        f"  group_size: {5 if gpus else 4}      # answers per question, compared with each other",
        *([] if gpus else PART_MARKS),
        "learner:",
        *(f"  {line}" for line in machine.learner),
        "  minibatches_per_batch: 2      # LLDS acts from the second optimiser step of a batch on",
        "algorithm:",
        "  llds:",
        "    lambda: 0.2      # the paper's; 0.3 for a 7B instruct model; 0 is plain GRPO",
        "trainer:",
        "  steps: 100" if gpus else "  steps: 3      # shows that all of it works; learning takes more",
        f"  eval_every: {(10 if gpus else 3) if held_out else 0}",
        *(["  keep_best: true      # `--checkpoint best` finds it"] if held_out else []),
        "  checkpoint_every: 10",
        *(
            ["evaluation:", f"  limit: {200 if gpus else 20}      # held-out questions during the run"]
            if held_out
            else []
        ),
    ]
    return "\n".join(lines) + "\n"


def _quoted(path: str) -> str:
    escaped = DoubleQuotedScalarString(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def init(
    model: Annotated[
        str,
        typer.Option(
            autocompletion=kept_in("trainer.data.models:KNOWN"),
            help="Folder of the model, or a name of `unspiral model list`.",
        ),
    ],
    data: Annotated[str, typer.Option(help="Questions to train on.")],
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of the machine; 0 is a CPU.")] = 0,
    held_out: Annotated[
        str | None, typer.Option("--eval", help="Held-out questions, to score during the run.")
    ] = None,
    corpus: Annotated[
        str | None,
        typer.Option(help=f"{CORPUS}, which the run indexes. It, --index or --url is required."),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(help=f"{INDEX}, to search; or the import path of a function of your own."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Address of a running retriever, in place of these.")
    ] = None,
    question_key: QuestionKey = None,
    answer_key: AnswerKey = None,
    source_key: SourceKey = None,
    question_id_key: QuestionIdKey = None,
    text_key: TextKey = None,
    title_key: TitleKey = None,
    id_key: IdKey = None,
    null_is_empty: NullIsEmpty = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Have a run leave malformed rows out and count them.")
    ] = False,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("unspiral.yaml"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help=REPLACES)] = False,
) -> None:
    """Write a commented configuration that fits the machine, the model and your data, whose rows are read
    first."""
    keys = Keys(question_key, answer_key, source_key, question_id_key, null_is_empty)
    columns = CorpusKeys(text_key, title_key, id_key, null_is_empty)
    if sum(one is not None for one in (corpus, index, url)) != 1:
        raise UserError("init: give one of --corpus, --index and --url, the passages that the agent searches")
    if columns and corpus is None:
        own = f"; the questions' ids are named by --question-id-key {id_key}" if id_key else ""
        raise UserError(
            f"init: --text-key, --title-key and --id-key are of a corpus; they go with --corpus{own}"
        )
    if url is not None:
        check_address("--url", url, "expected the address of a retriever, such as http://127.0.0.1:8000")
    refuse_to_replace(f"--out {out}", out, overwrite)
    for option, path in (("--data", data), ("--eval", held_out), ("--corpus", corpus), ("--index", index)):
        if path is None:
            continue
        if not path.strip():  # an unset variable, which would mean the current folder
            raise UserError(f"{option}: is empty; expected a file or folder")
        refuse_to_lose("--out", out, {option: path})
        there = Path(path).exists() or is_import_path(path) if option == "--index" else is_there(path)
        if not there:
            hint = near_path(path) or (with_colon(path) if option == "--index" else "")
            raise UserError(f"{option} {path}: no such file or folder{hint}")
        if option == "--index" and is_import_path(path) and not Path(path).exists():
            load_search(option, path)
        elif option == "--index":
            check_index(option, path)
    faults: list[str] = []
    told = _of_questions(data, held_out, keys, skip_bad, faults)
    with _meaning_the_questions(data, columns.id):
        told += _of_corpus(corpus, columns, skip_bad, faults)
    if faults:  # a run of the file would stop; and the next try would need --overwrite
        out_of_it = "mend these rows, or give --skip-bad; nothing is written"
        raise UserError("\n".join([*faults, *told, out_of_it]))
    planned = parameters_by_config(Path(model).expanduser())
    parameters = parameter_count(resolve(model)) if planned is None else planned
    given = next((name, one) for name, one in (("corpus", corpus), ("index", index), ("url", url)) if one)
    source = f"{given[0]}: {_quoted(given[1])}"
    text = text_of(
        parameters, gpus, model=model, data=data, held_out=held_out, source=source,
        keys=keys, columns=columns, skip_bad=skip_bad,
    )  # fmt: skip
    write_atomically(out, text)
    load_config(out)
    if planned is not None:
        typer.echo(f"note: {model}: no weights there yet; its size is taken from its config.json", err=True)
    for line in told:
        typer.echo(typed(line), err=True)
    typer.echo(
        typed(
            f"written to {out}; next: unspiral doctor --config {out}, then unspiral train --config {out}\n"
            f"A model that does not write the tags yet needs unspiral warm-start --config {out} first: "
            "docs/tutorial.md"
        )
    )


@contextmanager
def _meaning_the_questions(data: str, column: str | None) -> Iterator[None]:
    """Inside, a corpus that lacks the column of its ids is told of the option for those of the questions,
    where these have it."""
    try:
        yield
    except UserError as error:
        lacks = column and f"no column {column!r}, the id key" in str(error)
        if column and lacks and Path(data).exists() and Keys(id=column).of_file(data):
            error.args = (f"{error}; {data} has it: --question-id-key {shlex.quote(column)}",)
        raise


def _of_questions(
    data: str, held_out: str | None, keys: Keys, skip_bad: bool, faults: list[str]
) -> list[str]:
    """What is better known before a run: held-out questions that are trained on, rows that are none; faults:
    gets those at which it would stop. Raises UserError where no row of a file is a question. Names of the
    laboratory and the hub are not looked up."""
    lines: list[str] = []
    there = [path for path in (data, held_out) if path is not None and Path(path).exists()]
    for path in there:
        named = keys.beside(path, there[path == data]) if len(there) == 2 else keys
        report = validate(path, keys=named)
        if not report.good:
            raise UserError(f"{path}: {report.total_line}")
        if report.problems:
            _tell(f"{path}: {report.total_line}", skip_bad, "data", lines, faults)
        for said, rows in remarks(report):
            how = f"; {NULL_IS_EMPTY.format('data')}" if rows is report.no_value else ""
            lines.append(f"note: {said}{how}; the first: {rows[0]}")
    if len(there) == 2 and held_out is not None:
        same = sum(twin.similarity == 1 for twin in twins(held_out, data, keys=keys))
        if same:
            of = counted(same, "held-out question stands", "held-out questions stand")
            command = validating(held_out, data, null_is_empty=keys.null_is_empty, **keys.given)
            lines.append(f"note: {of} in {data} too: {command}")
    return lines


def _tell(line: str, skip_bad: bool, section: str, lines: list[str], faults: list[str]) -> None:
    """Malformed rows are a note where a run leaves them out, otherwise a fault."""
    if skip_bad:
        lines.append(f"note: {line}; left out by {section}.skip_bad")
    else:
        faults.append(line)


def _of_corpus(corpus: str | None, columns: CorpusKeys, skip_bad: bool, faults: list[str]) -> list[str]:
    """As `_of_questions`, of passages. Raises UserError where no row is one."""
    if corpus is None or not Path(corpus).exists():
        return []
    report = validate_corpus(Path(corpus), keys=columns, most=LOOKED_AT)
    if not report.good:
        raise UserError(f"{corpus}: {report.total_line or 'empty; expected at least one passage'}")
    lines: list[str] = []
    if report.total_line:
        _tell(f"{corpus}: {report.total_line}", skip_bad, "retriever", lines, faults)
    if line := other_columns(corpus, columns):
        lines.append(f"note: {line}")
    if report.no_id:
        lines.append(f"note: {corpus}: {placed_said(report.no_id)}")
    if report.no_value:
        lines.append(f"note: {corpus}: {no_value_said(report.no_value)}; {NULL_IS_EMPTY.format('retriever')}")
    return lines
