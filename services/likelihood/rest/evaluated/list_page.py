"""The list of a run's evaluations as a page: own questions, those of training, the papers' sets."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from services.common.files import hints
from services.common.shares import wilson
from services.common.validation import number_of
from services.likelihood.rest.evaluated.kept import Kept, protocol_of
from services.likelihood.rest.evaluated.of_training import name_of, weights_of
from services.likelihood.rest.evaluated.shell import (
    cell,
    compared_at,
    framed,
    hint,
    interval,
    link,
    panel,
    share,
    table,
)

TABLE = "table.json"
_POSTED = re.compile(r"eval/(em|f1)_(\w+)")
"""Names of held-out scores, with their mode, in what another trainer posts."""
AVERAGE = "macro"
"""The mean over the question sets, which the papers call the average."""
NONE = (
    "<p>This run has none: no held-out score was posted, and its folder holds no answers of "
    "<code>unspiral eval</code>. <code>unspiral eval --config CONFIG --checkpoint RUN</code> asks your own "
    "questions, with <code>--suite search7</code> the papers' sets.</p>"
)
OWN_HINT = (
    "Greedy answers, with the 95 % interval of the exact match. A name leads to every answer with its "
    "searches."
)
TRAINING_HINT = (
    "Asked while the run trained, of the same questions each time. Answers that were kept in the run's "
    "folder are there to be read."
)
SUITE_HINT = (
    "Exact match: the average of the question sets, with its 95 % interval. A name leads to all sets, beside "
    "the rows that papers print."
)
HEADS = [
    ("Evaluation", ""),
    ("Exact match", "n"),
    ("F1", "n"),
    ("Questions", "n"),
    ("Searches", "n"),
    ("Made, UTC", ""),
]
TRAINING_HEADS = [
    ("Weights of", ""),
    ("Mode", ""),
    ("Exact match", "n"),
    ("F1", "n"),
    ("Questions", "n"),
    ("Made, UTC", ""),
]
SUITE_HEADS = [
    ("Evaluation", ""),
    ("Method", ""),
    ("Exact match", "n"),
    ("Questions", "n"),
    ("Made, UTC", ""),
]


def list_page(
    run: str,
    suites: Mapping[str, Path],
    own: Mapping[str, Kept],
    events: Sequence[Mapping[str, Any]],
    asked: Mapping[str, Path],
    others: Sequence[str] = (),
    *,
    there: bool = True,
) -> str:
    """suites: the file of each suite's own page, by its name; own: answers to other questions; events: the
    held-out scores of training, oldest first; asked: the answers to these that were kept; others: names of
    folders beside the run's that hold evaluations, and no run; there: whether the run has a page."""
    parts = []
    scored = [one for event in events for one in by_mode(event)]
    if own:
        newest = sorted(own.items(), key=lambda one: -one[1].file.stat().st_mtime)
        rows = [_own(name, kept) for name, kept in newest]
        parts.append(panel("Own questions, by unspiral eval", table(HEADS, rows), hint(OWN_HINT)))
    if scored:
        rows = [_training(event, asked) for event in reversed(scored)]
        parts.append(
            panel(
                "Held-out questions of training",
                table(TRAINING_HEADS, rows),
                hint(TRAINING_HINT + _turned(run, scored, asked)),
            )
        )
    if suites:
        rows = [_suite(name, file) for name, file in suites.items()]
        parts.append(panel("The papers' question sets", table(SUITE_HEADS, rows), hint(SUITE_HINT)))
    title = f"Evaluations of {run}"
    parts = parts or [panel(title, NONE)]
    if others:
        ways = ", ".join(link(f"/runs/{quote(name)}/evaluations", name) for name in others)
        parts.append(hint(f"Beside the runs, evaluations of models that were not trained here: {ways}."))
    return framed(run, title, parts, there=there)


def by_mode(event: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A posted evaluation with its `overall` scores: as a run of ours posts them, otherwise of each mode that
    its `metrics` name (`eval/em_greedy`); none where it has neither."""
    data = event["data"]
    if isinstance(data.get("overall"), dict):
        return [event]
    modes: dict[str, dict[str, Any]] = {}
    metrics = data.get("metrics")
    for name, value in metrics.items() if isinstance(metrics, dict) else ():
        if found := _POSTED.fullmatch(name):
            modes.setdefault(found[2], {})[found[1]] = value
    return [{**event, "data": {**data, "mode": mode, "overall": scores}} for mode, scores in modes.items()]


def _own(name: str, kept: Kept) -> str:
    about = protocol_of(kept.file)
    scores = kept.scores
    return _row(
        _name(name, f"evaluations/{quote(name)}", asked_of(about)),
        cell(share(scores.em), "Exact match", small=interval(*scores.interval)),
        cell(share(scores.f1), "F1"),
        cell(f"{scores.n:,}", "Questions"),
        cell(f"{scores.searches:.2f}", "Searches"),
        _time(kept.file.stat().st_mtime),
    )


def _training(event: Mapping[str, Any], asked: Mapping[str, Path]) -> str:
    data, overall = event["data"], event["data"]["overall"]
    mode = str(data.get("mode", ""))
    em, n = number_of(overall.get("em")), overall.get("n")
    if type(n) is not int or n < 0:  # any client may post an event of this kind
        n = None
    bounds = wilson(em, n) if em is not None and 0 <= em <= 1 and n else (None, None)
    name = name_of(event)
    answers = asked.get(name)
    to = f"evaluations/{quote(name)}" if answers else None
    return _row(
        _name(weights_of(event), to, f"answers: {answers.name}" if answers else "answers were not kept here"),
        cell(mode or "–", "Mode", ""),
        cell(share(em), "Exact match", small=interval(*bounds)),
        cell(share(overall.get("f1")), "F1"),
        cell("–" if n is None else f"{n:,}", "Questions"),
        _time(event["time"]),
    )


def _turned(run: str, scored: Sequence[Mapping[str, Any]], asked: Mapping[str, Path]) -> str:
    """The ways from the first to the newest answers of each mode, question by question."""
    kept: dict[str, dict[str, Mapping[str, Any]]] = {}
    for event in scored:
        if (name := name_of(event)) in asked:
            kept.setdefault(str(event["data"].get("mode", "")), {})[name] = event
    ways = []
    for mode, found in kept.items():
        first, last = next(iter(found)), list(found)[-1]
        if first != last:
            said = f"{weights_of(found[first])} → {weights_of(found[last])}, {mode}"
            ways.append(link(compared_at(run, last, first), said))
    return f" Which turned right, which wrong: {'; '.join(ways)}." if ways else ""


def _suite(name: str, file: Path) -> str:
    row = _measured(file.with_name(TABLE))
    average = row.get("em", {}).get(AVERAGE, {})
    return _row(
        _name(name, f"evaluations/{quote(name)}", str(row.get("model", ""))),
        cell(str(row.get("method", "–")), "Method", ""),
        cell(
            share(average.get("mean")), "Exact match", small=interval(average.get("low"), average.get("high"))
        ),
        cell(str(row.get("n", "–")), "Questions"),
        _time(file.stat().st_mtime),
    )


def asked_of(about: Mapping[str, Any]) -> str:
    """The weights that were asked, and how, in a line."""
    model = about.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    protocol = about.get("protocol")
    parts = [str(name) if name else "how it was asked was not kept"]
    if isinstance(protocol, dict):
        wanted = (("template", "template {}"), ("top_k", "top {}"), ("max_turns", "{} turns"))
        parts += [form.format(protocol[key]) for key, form in wanted if protocol.get(key) is not None]
    return ", ".join(parts)


def _row(*cells: str) -> str:
    return f"<tr>{''.join(cells)}</tr>"


def _name(name: str, to: str | None, below: str) -> str:
    shown = link(to, name) if to else html.escape(name)
    return f'<th scope="row">{shown}<small class="muted">{html.escape(below)}</small></th>'


def _time(seconds: float) -> str:
    made = datetime.fromtimestamp(seconds, UTC)
    shown = f'<time datetime="{made:%Y-%m-%dT%H:%M:%SZ}">{made:%Y-%m-%d %H:%M}</time>'
    return f'<td data-label="Made, UTC">{shown}</td>'


def _measured(file: Path) -> dict[str, Any]:
    """The suite's own row; empty where an earlier version wrote none, or it cannot be read."""
    try:
        (row,) = hints(file)["measured"]
        em = row["em"].get(AVERAGE, {})
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {**row, "em": {AVERAGE: em if isinstance(em, dict) else {}}}
