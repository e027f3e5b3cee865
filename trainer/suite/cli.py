"""`unspiral eval compare` and `eval page`: evaluations side by side, on a terminal and
as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from services.common.counting import counted
from services.common.errors import UserError
from services.common.files import write_atomically
from services.common.printing.completed import one_of
from services.common.printing.harmless import in_one_line
from services.common.printing.help_pages import REPLACES
from services.common.users_files import refuse_no_file, refuse_to_lose, refuse_to_replace
from trainer.suite.compare import compare
from trainer.suite.finished import (
    KEPT,
    kept_evaluations,
    kept_suites,
    load,
    load_result,
    refuse_one_runs_own,
)
from trainer.suite.result import RESULT_FILE
from trainer.suite.rows import ANSWERS_FILE, METRICS
from trainer.suite.sets import TITLES, in_order
from trainer.suite.shown.page import page
from trainer.suite.shown.tables import COLUMNS, HEADS, as_printed, latex_together, rows_of, together

PAGE = "evaluations.html"
SHOWN_GOLDEN = 4
"""Golden answers of a question that are printed; TriviaQA has dozens of some."""
SHOWN_CHARACTERS = 200
"""Of a question or an answer; an answer may be all that the model wrote."""


def compare_command(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="EVALUATION",
            autocompletion=kept_evaluations,
            help="Folders of `eval --suite`, or answers that `eval` has kept: NAME.answers.jsonl, or a "
            "folder with answers.jsonl. Each is compared with the first.",
        ),
    ],
    metric: Annotated[
        str,
        typer.Option(
            autocompletion=one_of(METRICS),
            help="Score to compare: em, f1, subem, em_strict or em_search_r1.",
        ),
    ] = "em",
    flips: Annotated[
        int, typer.Option(min=0, help="Questions of each set to print whose score differs.")
    ] = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with all questions whose score differs.")
    ] = False,
) -> None:
    """Compare evaluations question by question: paired differences with intervals, an exact test, and the
    questions whose score differs."""
    if len(results) < 2:
        raise UserError(f"eval compare: one evaluation given; expected `eval compare A B`, each {KEPT}")
    refuse_one_runs_own(results)
    first, *others = map(load, results)
    found = [compare(first, other, metric) for other in others]
    if as_json:
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
        return
    for one in found:
        for line in report(one, flips):
            typer.echo(line)


def page_command(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="EVALUATION", autocompletion=kept_suites, help="Folders of `eval --suite`."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file: by its name Markdown (.md), LaTeX (.tex), JSON or HTML. Default: "
            f"{PAGE}, which is replaced."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help=REPLACES)] = False,
) -> None:
    """Write the exact match of evaluations into one table, beside the rows that papers print (LaTeX: as
    comments)."""
    if out is not None:
        refuse_no_file("--out", out)
        read = [one / name for one in results for name in (RESULT_FILE, ANSWERS_FILE)]
        refuse_to_lose("--out", out, {str(file): file for file in read})
        refuse_to_replace(f"--out {out}", out, overwrite)
    out = out or Path(PAGE)
    write_atomically(out, _written_as(out.suffix, [load_result(folder) for folder in results]))
    typer.echo(f"written to {out}")


def _written_as(suffix: str, results: list[dict[str, Any]]) -> str:
    match suffix.lower():
        case ".md":
            return f"{together(results)}\n{as_printed()}"
        case ".tex":
            return latex_together(results)
        case ".json":
            return json.dumps(rows_of(results), indent=1, ensure_ascii=False) + "\n"
        case _:
            return page(results)


def report(found: dict[str, Any], flips: int) -> list[str]:
    """The lines of one comparison."""
    lines = [
        f"{found['second']} minus {found['first']}, {found['metric']}, {counted(found['n'], 'question')}"
    ]
    lines += [f"warning: {warning}" for warning in found["warnings"]]
    entries = _entries(found)
    width = max(10, *(len(head) for head, _ in entries))
    heads = f"{'':{width}} {'n':>7} {'first':>7} {'second':>7} {'difference, interval':>24}"
    lines.append(f"{heads} {'better':>7} {'worse':>6} {'p':>7}")
    lines += [_line(head, width, entry) for head, entry in entries]
    for name in found["sets"]:
        of_set = [flip for flip in found["flipped"] if flip["set"] == name]
        if of_set and flips:
            lines += ["", f"{_head(name)}: {counted(len(of_set), 'differs', 'differ')}"]
            lines += [text for flip in of_set[:flips] for text in _flip(flip)]
            if len(of_set) > flips:
                lines.append(f"  ... and {len(of_set) - flips:,} more (--flips, --json)")
    return [*lines, ""]


def _head(name: str) -> str:
    """A set's name as it is printed; `micro` and the like are names of data sources here."""
    return TITLES.get(name) or in_one_line(name, SHOWN_CHARACTERS) or "(no name)"


def _entries(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Lines' heads and numbers, in the papers' columns; sources of one's own stand before the averages of
    all."""
    sets, averages = found["sets"], found["averages"]
    own = [(_head(name), sets[name]) for name in in_order(sets) if name not in TITLES]
    papers = [
        (HEADS[name], there[name])
        for name in COLUMNS
        for there in ((sets if name in TITLES else averages),)
        if name in there
    ]
    last = sum(name in averages for name in COLUMNS[-2:])
    return [*papers[: len(papers) - last], *own, *papers[len(papers) - last :]]


def _line(name: str, width: int, entry: dict[str, Any]) -> str:
    difference = entry["difference"]
    interval = f"{difference['mean']:+.3f} ({difference['low']:+.3f} to {difference['high']:+.3f})"
    tested = f" {entry['better']:7} {entry['worse']:6} {entry['p']:7.3g}" if "p" in entry else ""
    n = f"{entry['n']:,}" if "n" in entry else ""
    return f"{name:{width}} {n:>7} {entry['first']:7.3f} {entry['second']:7.3f} {interval:>24}{tested}"


def _flip(flip: dict[str, Any]) -> list[str]:
    better = "+" if flip["scores"][1] > flip["scores"][0] else "-"
    golden = " | ".join(_short(text) for text in flip["golden_answers"][:SHOWN_GOLDEN])
    if (more := len(flip["golden_answers"]) - SHOWN_GOLDEN) > 0:
        golden += f" | and {more} more"
    answers = " -> ".join("(none)" if answer is None else _short(answer) for answer in flip["answers"])
    return [
        f"  {better} {_short(flip['key'])}: {_short(flip['question'])}",
        f"      {answers}   golden: {golden}",
    ]


def _short(text: str) -> str:
    return in_one_line(text, SHOWN_CHARACTERS)
