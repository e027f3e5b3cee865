"""Commands on question files and known models: `data validate|convert`, `model fetch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.common.errors import UserError
from trainer.data.convert import convert
from trainer.data.models import fetch
from trainer.data.overlap import NEAR, twins
from trainer.data.questions import validate

data_app = typer.Typer(help="Check and convert question files.", no_args_is_help=True)
model_app = typer.Typer(
    help="Small models whose weights come in Python packages, and the papers' checkpoints.",
    no_args_is_help=True,
)

SHOWN_PROBLEMS = 10


@data_app.command("validate")
def validate_command(
    path: Annotated[Path, typer.Argument(help="Question file or folder, of any layout in docs/data.md.")],
    against: Annotated[
        Path | None,
        typer.Option(
            help="Questions that must not stand in PATH, such as the training set's. Lists those that do."
        ),
    ] = None,
) -> None:
    """Read every row and count the questions of each data source. Malformed rows are listed, and make the
    exit status 2; so do questions of --against."""
    report = validate(path)
    _list(report.problems)
    _list(report.emptied)
    width = max(map(len, [*report.sources, "total"]))
    for source, count in sorted(report.sources.items()):
        typer.echo(f"{source:{width}}  {count:8,}")
    typer.echo(f"{'total':{width}}  {report.good:8,}")
    for (question, answers), count in report.read_from.most_common():
        if (question, answers) != ("question", "golden_answers"):
            typer.echo(
                f"in {count:,} rows the question was read from `{question}` and the answers from `{answers}`"
            )
    if report.emptied:
        typer.echo(
            f"{len(report.emptied):,} rows have a golden answer of which scoring by em, f1 and subem leaves "
            "nothing"
        )
    same = _list_twins(path, against) if against is not None else 0
    if report.problems:
        raise UserError(f"{path}: {report.total_line}")
    if same:
        raise UserError(f"{path}: {same:,} of {report.good:,} questions stand in {against} too")


def _list_twins(path: Path, against: Path) -> int:
    """Print the questions that are in both files, or nearly; how many are the same."""
    found = twins(path, against)
    same = [twin for twin in found if twin.similarity == 1]
    near = [twin for twin in found if twin.similarity < 1]
    _list([f"same: {twin.question.id}: {twin.question.text}" for twin in same])
    _list(
        [
            f"near ({twin.similarity:.2f}): {twin.question.id}: {twin.question.text} | {twin.other.id}: "
            f"{twin.other.text}"
            for twin in near
        ]
    )
    agree = sum(twin.answers_agree for twin in near)
    typer.echo(
        f"against {against}: {len(same):,} questions are the same, {len(near):,} are near "
        f"(at least {NEAR:.0%} of the words; {agree:,} of these with an answer in common)"
    )
    return len(same)


def _list(lines: list[str]) -> None:
    for line in lines[:SHOWN_PROBLEMS]:
        typer.echo(line)
    if len(lines) > SHOWN_PROBLEMS:
        typer.echo(f"... and {len(lines) - SHOWN_PROBLEMS:,} more")


@data_app.command("convert")
def convert_command(
    src: Annotated[
        Path, typer.Argument(help="Question file or folder to read, of any layout in docs/data.md.")
    ],
    dst: Annotated[
        Path, typer.Argument(help="File to write: .parquet (Search-R1), .jsonl or .jsonl.gz (FlashRAG).")
    ],
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave malformed rows out and count them.")
    ] = False,
) -> None:
    """Write the questions in another format, by the file's ending."""
    done = convert(src, dst, skip_bad=skip_bad)
    typer.echo(
        f"{len(done.rows):,} questions written to {dst}"
        + (f", {done.skipped:,} malformed rows left out" if done.skipped else "")
    )


@model_app.command("fetch")
def fetch_command(name: Annotated[str, typer.Argument(help="A name of `model list`.")]) -> None:
    """Convert a known model to a Hugging Face folder in the cache, if it is not there yet, and print its
    path. A paper's checkpoint is downloaded from the hub."""
    typer.echo(fetch(name, say=lambda text: typer.echo(text, err=True)))
