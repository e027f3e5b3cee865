"""The list of a run's evaluations as a page: of each its method, exact match with the interval, questions and
time."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

PAGE = Path(__file__).parents[1] / "static" / "evaluations.html"
TABLE = "table.json"
AVERAGE = "macro"
"""The mean over the question sets, which the papers call the average."""
NONE = "<p>None is in the run's folder. <code>unspiral eval --suite search7</code> makes one.</p>"
HINT = (
    '<p class="hint">Exact match: the average of the question sets, with its 95 % interval. A name leads to '
    "all sets, beside the rows that papers print.</p>"
)
HEADS = (("Evaluation", ""), ("Method", ""), ("Exact match", "n"), ("Questions", "n"), ("Made, UTC", ""))


def list_page(run: str, pages: Mapping[str, Path]) -> str:
    """`pages`: the file of each evaluation's own page, by its name."""
    heads = "".join(f'<th scope="col" class="{kind}">{head}</th>' for head, kind in HEADS)
    body = "".join(_row(name, file) for name, file in pages.items())
    table = f'<table class="listed"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{HINT}'
    parts = {
        "<!--run-->": html.escape(run),
        "<!--back-->": f"/#runs={quote(quote(run))}",
        "<!--listed-->": table if pages else NONE,
    }
    text = PAGE.read_text(encoding="utf-8")
    for place, part in parts.items():
        text = text.replace(place, part)
    return text


def _row(name: str, file: Path) -> str:
    row = _measured(file.with_name(TABLE))
    mean, low, high = (_number(row.get("em", {}).get(AVERAGE, {}).get(k)) for k in ("mean", "low", "high"))
    interval = f'<small class="muted">{low}–{high}</small>' if low and high else ""
    made = datetime.fromtimestamp(file.stat().st_mtime, UTC)
    return (
        f'<tr><th scope="row"><a href="evaluations/{quote(name)}">{html.escape(name)}</a>'
        f'<small class="muted">{html.escape(str(row.get("model", "")))}</small></th>'
        f"<td>{html.escape(str(row.get('method', '–')))}</td>"
        f'<td class="n">{mean or "–"}{interval}</td>'
        f'<td class="n">{html.escape(str(row.get("n", "–")))}</td>'
        f'<td><time datetime="{made:%Y-%m-%dT%H:%M:%SZ}">{made:%Y-%m-%d %H:%M}</time></td></tr>'
    )


def _measured(file: Path) -> dict[str, Any]:
    """The evaluation's own row; empty where an earlier version wrote none, or it cannot be read."""
    try:
        (row,) = json.loads(file.read_text(encoding="utf-8"))["measured"]
        em = row["em"].get(AVERAGE, {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {**row, "em": {AVERAGE: em if isinstance(em, dict) else {}}}


def _number(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else ""
