"""The lines of `unspiral data validate` on questions: malformed rows, what is odd about others, counts."""

from __future__ import annotations

import typer

from services.common.counting import counted
from services.common.printing.harmless import harmless
from services.common.records.columns import NULL_IS_EMPTY, plain_name
from trainer.data.checks.remarks import contradicting_said, no_value_said, several_said
from trainer.data.columns import Keys
from trainer.data.questions import Report

ODDLY = "like UTF-8 that was read as another encoding"
SHOWN_PROBLEMS = 10
LONG_REASON = 120
"""Characters from which on a reason is told once."""
SHOWN_ALIKE = 3


def say_findings(report: Report, keys: Keys) -> None:
    """The malformed rows, what is odd about others, and the counts. keys: columns that the user has named,
    which are not told."""
    _say_problems(report)
    for line in report.first_notes:
        typer.echo(harmless(line))
    if more := report.notes - len(report.first_notes):
        typer.echo(f"... and {more:,} more, counted below; --json lists all")
    width = max(map(len, [*report.sources, "total"]))
    for source, count in sorted(report.sources.items()):
        typer.echo(f"{source:{width}}  {count:8,}")
    typer.echo(f"{'total':{width}}  {report.good:8,}")
    for (question, answers), count in report.read_from.most_common():
        if not (_is(question, keys.question or "question") and _is(answers, keys.answer or "golden_answers")):
            typer.echo(
                f"in {counted(count, 'row')} the question was read from `{question}` and the answers from "
                f"`{answers}`"
            )
    if report.emptied:
        typer.echo(
            f"{counted(len(report.emptied), 'row has', 'rows have')} a golden answer of which scoring by em, "
            "f1 and subem leaves nothing"
        )
    if report.no_value:
        typer.echo(
            f"{no_value_said(len(report.no_value))}, which tables hold where there is nothing; a run takes "
            f"it at its word; {NULL_IS_EMPTY.format('data')}"
        )
    if report.repeated:
        typer.echo(
            f"{counted(len(report.repeated), 'question repeats', 'questions repeat')} one that stands before"
        )
    if report.contradicting:
        typer.echo(
            f"{contradicting_said(len(report.contradicting))}: they have no answer in common, and at most "
            "one can be learnt"
        )
    if report.several:
        typer.echo(
            f"{several_said(len(report.several))}, which is read as one answer; write them as a JSON list, "
            'such as ["Anna", "Bob"], or with <|answer_split|> between them'
        )
    if report.same_ids:
        typer.echo(
            f"{counted(len(report.same_ids), 'question has', 'questions have')} the id of an earlier one; "
            "a run takes each row for a question of its own"
        )
    if report.odd:
        typer.echo(f"{counted(len(report.odd), 'row looks', 'rows look')} {ODDLY}")


def _is(column: str, key: str) -> bool:
    return plain_name(column) == plain_name(key)


def last_line(report: Report) -> str:
    """How many rows are malformed, with the commonest reason; not behind the line of the only one, which has
    told it."""
    only_one = len(report.problems) == 1 and report.good
    return report.count_line if only_one else report.total_line


def _say_problems(report: Report) -> None:
    """The malformed rows: some of each reason, so that a column's name says itself a few times only. A long
    reason is told once: the most frequent one by the last line, which all commands print."""
    last = next(iter(report.reasons.most_common(1)), ("", 0))[0]
    if len(report.problems) == 1 and not report.good:
        return  # the last line tells it
    for reason, count in report.reasons.most_common(SHOWN_PROBLEMS):
        alike = [line for line in report.problems if line.endswith(f": {reason}")][:SHOWN_ALIKE]
        if count > 1 and len(reason) > LONG_REASON:
            if reason == last:
                if count == len(report.problems) and not report.good:  # the file is described, not its rows
                    continue
                told = "malformed, as the last line says"
            else:
                typer.echo(harmless(alike.pop(0)))
                told = "the same"
            alike = [f"{line.removesuffix(reason)}{told}" for line in alike]
        for line in alike:
            typer.echo(harmless(line))
        if count > SHOWN_ALIKE:
            typer.echo(f"... and {count - SHOWN_ALIKE:,} more for this reason")


def say_first(lines: list[str]) -> None:
    """The first lines of one kind, and how many there are beside them."""
    for line in lines[:SHOWN_PROBLEMS]:
        typer.echo(harmless(line))
    if len(lines) > SHOWN_PROBLEMS:
        typer.echo(f"... and {len(lines) - SHOWN_PROBLEMS:,} more")
