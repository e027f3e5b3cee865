"""Commands on question files: `data validate`, `data convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer.data.errors import DataError

data_app = typer.Typer(help="Check and convert question files.", no_args_is_help=True)

SHOWN_PROBLEMS = 10


@data_app.command("validate")
def validate_command(
    path: Annotated[Path, typer.Argument(help="Question file or folder, of any layout in docs/data.md.")],
) -> None:
    """Read every row and count the questions of each data source. Malformed rows are listed, and make the
    exit status 2."""
    from trainer.data.questions import validate

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
            f"{len(report.emptied):,} rows have a golden answer of which scoring by em, f1 and subem leaves nothing"
        )
    if report.problems:
        raise DataError(f"{path}: {report.total_line}")


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
    from trainer.data.convert import convert

    done = convert(src, dst, skip_bad=skip_bad)
    typer.echo(
        f"{len(done.rows):,} questions written to {dst}"
        + (f", {done.skipped:,} malformed rows left out" if done.skipped else "")
    )
