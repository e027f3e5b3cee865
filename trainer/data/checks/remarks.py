"""What is better known of questions that a run takes, in the words of all commands."""

from __future__ import annotations

from collections.abc import Iterator

from services.common.counting import counted
from services.common.records.columns import SUCH_AS
from trainer.data.questions import Report


def remarks(report: Report) -> Iterator[tuple[str, list[str]]]:
    """A remark for each kind that the report has of these, and its rows, one line for each."""
    for said, lines in (
        (contradicting_said, report.contradicting),
        (no_value_said, report.no_value),
        (several_said, report.several),
    ):
        if lines:
            yield said(len(lines)), lines


def contradicting_said(count: int) -> str:
    """Questions without an answer in common with an earlier one of the same words."""
    return counted(count, "question contradicts an earlier one", "questions contradict earlier ones")


def no_value_said(count: int) -> str:
    """Rows that hold what tables hold where there is nothing."""
    held = f"a question, an answer, an id or a source such as {SUCH_AS}"
    return counted(count, f"row has {held}", f"rows have {held}")


def several_said(count: int) -> str:
    """Rows whose only answer looks like several."""
    held = "to hold several answers in one text"
    return counted(count, f"row seems {held}", f"rows seem {held}")
