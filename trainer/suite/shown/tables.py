"""Results as Markdown, LaTeX and JSON, in the papers' columns: one result, or several in one table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from trainer.suite.rows import METRICS
from trainer.suite.sets import GENERAL, MULTI_HOP, TITLES
from trainer.suite.shown.published import PUBLISHED, Printed

COLUMNS = (*GENERAL, "general", *MULTI_HOP, "multi_hop", "macro", "micro")
HEADS = TITLES | {"general": "General", "multi_hop": "Multi-hop", "macro": "Average", "micro": "Micro"}
METRIC_TITLES = {
    "em": "EM",
    "f1": "F1",
    "subem": "Sub-EM",
    "em_strict": "Strict EM",
    "em_search_r1": "EM (Search-R1)",
}
ABSENT = "-"
Line = tuple[str, dict[str, dict[str, float]]]
"""A label, and the estimate of each column."""


def lines_of(result: dict[str, Any]) -> list[Line]:
    """One line for each metric, then the sampled ones."""
    lines: list[Line] = [
        (
            METRIC_TITLES[metric],
            {name: one[metric] for part in ("sources", "averages") for name, one in result[part].items()},
        )
        for metric in METRICS
    ]
    for name, part in result.get("sampled", {}).items():
        if name != "samples":
            title = "Sampled mean EM" if name == "mean" else f"{name} (EM)"
            lines.append((title, part["sources"] | part["averages"]))
    return lines


def markdown(result: dict[str, Any]) -> str:
    """The table of a result, with intervals, and the lines that say what it is of."""
    return "\n".join(
        [f"# {title_of(result)}", "", *_markdown_table(lines_of(result)), "", *notes(result), ""]
    )


def together(results: Sequence[dict[str, Any]]) -> str:
    """The exact match of several results in one Markdown table, and the lines that say what each is of."""
    lines: list[Line] = [(_label(result), exact_match(result)) for result in results]
    described = [line for result in results for line in (f"## {title_of(result)}", "", *notes(result), "")]
    return "\n".join(["# Exact match", "", *_markdown_table(lines), "", *described])


def _label(result: dict[str, Any]) -> str:
    return f"{result['model']['name']}, {result['method']}"


def exact_match(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Mean, low and high by column; a column that is absent has no key."""
    return dict(lines_of(result))[METRIC_TITLES["em"]]


def rows_of(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """JSON-able: `columns` (key and head), `measured` (model, method, n, and exact match as mean, low, high
    by column) and `printed` (paper, model, method, and exact match by column). An absent column has no key.
    """
    return {
        "columns": [{"key": name, "head": HEADS[name]} for name in COLUMNS],
        "measured": [
            {
                "model": result["model"]["name"],
                "method": result["method"],
                "n": result["n"],
                "em": exact_match(result),
            }
            for result in results
        ],
        "printed": [
            {"paper": row.paper, "model": row.model, "method": row.method, "em": printed_of(row)}
            for row in PUBLISHED
        ],
    }


def printed_of(row: Printed) -> dict[str, float]:
    """By column, without the averages that the paper does not print."""
    averages = {"general": row.general, "multi_hop": row.multi_hop, "macro": row.macro}
    return row.by_set | {name: value for name, value in averages.items() if value is not None}


def title_of(result: dict[str, Any]) -> str:
    return f"{result['suite']}, method {result['method']}, {result['model']['name']}"


def as_printed() -> str:
    """The papers' own rows, as Markdown. Averages that a paper does not print are absent."""
    lines = []
    for row in PUBLISHED:
        printed = printed_of(row)
        cells = (printed.get(name) for name in COLUMNS)
        numbers = " | ".join(ABSENT if value is None else short(value) for value in cells)
        lines.append(f"| {row.model}, {row.method} ({row.paper}) | {numbers} |")
    return "\n".join(
        [
            "## As papers print it",
            "",
            "Exact match from the papers, not measured here; their protocols differ from this one and from "
            "each other (docs/evaluation.md).",
            "",
            *_head(),
            *lines,
            "",
        ]
    )


def _head() -> list[str]:
    heads = " | ".join(HEADS[name] for name in COLUMNS)
    return [f"| | {heads} |", f"| --- |{' --- |' * len(COLUMNS)}"]


def _markdown_table(lines: Iterable[Line]) -> Iterator[str]:
    yield from _head()
    for label, cells in lines:
        yield f"| {label} | {' | '.join(_cell(cells.get(name)) for name in COLUMNS)} |"


def _cell(estimate: dict[str, float] | None) -> str:
    if estimate is None:
        return ABSENT
    return f"{short(estimate['mean'])} ({short(estimate['low'])}-{short(estimate['high'])})"


def short(value: float) -> str:
    """Three digits without the 0 in front, as the papers print them."""
    text = f"{value:.3f}"
    return text[1:] if text.startswith("0.") else text


def notes(result: dict[str, Any]) -> Iterator[str]:
    """What the table is of: rows, subsets, sets that are missing."""
    level = round(100 * result["interval"]["level"])
    yield f"- {result['n']:,} questions, greedy; in brackets the {level} % bootstrap interval."
    described = (
        f"{TITLES[name]} {one['split']}, {one['subset']} ({one['digest']})"
        for name, one in result["sets"].items()
    )
    yield f"- Rows: {'; '.join(described)}."
    if result["missing_sets"]:
        names = ", ".join(TITLES[name] for name in result["missing_sets"])
        yield f"- No rows of {names}: averages that need them are absent."
    searches = ", ".join(f"{TITLES[name]} {one['searches']:.2f}" for name, one in result["sources"].items())
    yield f"- Searches per question: {searches}."
    if "sampled" in result:
        yield f"- {result['sampled']['samples']} samples per question at the run's temperature."


def latex(result: dict[str, Any]) -> str:
    """All lines of a result as a LaTeX table."""
    return _latex_table([result], lines_of(result))


def latex_together(results: Sequence[dict[str, Any]]) -> str:
    """The exact match of several results in one LaTeX table."""
    return _latex_table(results, [(_label(result), exact_match(result)) for result in results])


def _latex_table(results: Sequence[dict[str, Any]], lines: Iterable[Line]) -> str:
    """A `booktabs` table, intervals as small type below each number. The papers' rows are comments: which of
    them stand beside one's own is the author's choice."""
    heads = " & ".join(_escaped(HEADS[name]) for name in COLUMNS)
    return "\n".join(
        [
            r"% \usepackage{booktabs}",
            *map(_latex_comment, results),
            rf"\begin{{tabular}}{{l{'c' * len(COLUMNS)}}}",
            r"\toprule",
            rf" & {heads} \\",
            r"\midrule",
            *(text for line in lines for text in _latex_lines(line)),
            r"% \midrule",
            "% Exact match as papers print it, not measured here; their protocols differ.",
            *map(_latex_printed, PUBLISHED),
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _latex_comment(result: dict[str, Any]) -> str:
    rows = "; ".join(f"{TITLES[name]} {one['subset']}" for name, one in result["sets"].items())
    return f"% {_escaped(title_of(result))}; greedy; rows: {_escaped(rows)}"


def _latex_lines(line: Line) -> tuple[str, str]:
    label, cells = line
    numbers = " & ".join(_latex_cell(cells.get(name), top=True) for name in COLUMNS)
    intervals = " & ".join(_latex_cell(cells.get(name), top=False) for name in COLUMNS)
    return rf"{_escaped(label)} & {numbers} \\", rf" & {intervals} \\"


def _latex_printed(row: Printed) -> str:
    printed = printed_of(row)
    numbers = " & ".join(short(printed[name]) if name in printed else "--" for name in COLUMNS)
    return rf"% {_escaped(f'{row.model}, {row.method}')} & {numbers} \\ % {row.paper}"


def _latex_cell(estimate: dict[str, float] | None, *, top: bool) -> str:
    if estimate is None:
        return "--" if top else ""
    if top:
        return short(estimate["mean"])
    return rf"{{\scriptsize {short(estimate['low'])}--{short(estimate['high'])}}}"


def _escaped(text: str) -> str:
    named = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
    }
    flat = " ".join(text.split())  # a line break would end a comment
    return "".join(named.get(c, rf"\{c}" if c in "&%$#_{}" else c) for c in flat)
