"""A page of results beside the rows that papers print: one HTML file that loads nothing else."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from trainer.suite.sets import GENERAL, MULTI_HOP
from trainer.suite.shown.published import PUBLISHED, Printed
from trainer.suite.shown.tables import (
    ABSENT,
    COLUMNS,
    HEADS,
    exact_match,
    notes,
    printed_of,
    short,
    title_of,
)

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
AVERAGES = {"general", "multi_hop", "macro", "micro"}
STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: light-dark(#666, #9a9a9a); --ours: #4a90d922; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 82rem; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); }
th, td { text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom-width: 2px; }
.mean { font-weight: 600; }
tr.ours { background: var(--ours); }
tr.part th { text-align: left; padding-top: 1rem; }
tr.part span { position: sticky; left: .6rem; display: inline-block; max-width: calc(100vw - 3.5rem);
  white-space: normal; }
small { display: block; color: var(--soft); font-weight: normal; }
thead tr:first-child th { text-align: center; border-bottom-width: 1px; }
.sideways { display: none; color: var(--soft); font-size: .87rem; }
@media (max-width: 1000px) {
  .sideways { display: block; }
  tbody td:first-child { position: sticky; left: 0; background: Canvas; white-space: normal;
    min-width: 7.5rem; max-width: 9rem; }
  tr.ours td:first-child { background: linear-gradient(var(--ours), var(--ours)), Canvas; }
}
"""


def page(results: Sequence[dict[str, Any]]) -> str:
    """The page of one or more results, exact match: ours first, each with its interval, then the papers'
    rows."""
    rows = [_part("Measured here, greedy, with the bootstrap interval"), *map(_ours, results)]
    for paper in dict.fromkeys(row.paper for row in PUBLISHED):
        rows.append(_part(f"As printed in {paper}, not measured here"))
        rows += [_printed(row) for row in PUBLISHED if row.paper == paper]
    described = "".join(
        f"<h2>{html.escape(title_of(result))}</h2><ul>{_items(notes(result))}</ul>" for result in results
    )
    groups = (("", 1), ("General", len(GENERAL) + 1), ("Multi-hop", len(MULTI_HOP) + 1), ("All", 2))
    above = "".join(f'<th colspan="{width}">{name}</th>' for name, width in groups)
    heads = "".join(f"<th{_class(name)}>{html.escape(HEADS[name])}</th>" for name in COLUMNS)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Exact match on seven sets</title><style>{STYLE}</style></head><body>"
        "<h1>Exact match on seven sets</h1>"
        "<p>The papers' protocols differ from these and from each other: compare within a part of the table "
        "first.</p>"
        '<p class="sideways">The table scrolls sideways: more columns →</p>'
        '<div class="wide" tabindex="0" role="region" aria-label="Exact match">'
        f"<table><thead><tr>{above}</tr><tr><th></th>{heads}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>{described}</body></html>\n"
    )


def _part(text: str) -> str:
    return f'<tr class="part"><th colspan="{len(COLUMNS) + 1}"><span>{html.escape(text)}</span></th></tr>'


def _ours(result: dict[str, Any]) -> str:
    cells = exact_match(result)
    label = f"{html.escape(result['model']['name'])}<small>{html.escape(result['method'])}</small>"
    return _row("ours", label, (_estimate(cells.get(name)) for name in COLUMNS))


def _estimate(cell: dict[str, float] | None) -> str:
    if cell is None:
        return ABSENT
    return f"{short(cell['mean'])}<small>{short(cell['low'])}–{short(cell['high'])}</small>"


def _printed(row: Printed) -> str:
    printed = printed_of(row)
    values = (printed.get(name) for name in COLUMNS)
    label = f"{html.escape(row.model)}<small>{html.escape(row.method)}</small>"
    return _row("printed", label, (ABSENT if value is None else short(value) for value in values))


def _row(kind: str, label: str, cells: Iterable[str]) -> str:
    shown = "".join(f"<td{_class(name)}>{cell}</td>" for name, cell in zip(COLUMNS, cells, strict=True))
    return f'<tr class="{kind}"><td>{label}</td>{shown}</tr>'


def _class(name: str) -> str:
    return ' class="mean"' if name in AVERAGES else ""


def _items(lines: Iterable[str]) -> str:
    return "".join(f"<li>{html.escape(line.removeprefix('- '))}</li>" for line in lines)
