"""The page of one evaluation: its scores, how it was asked, and its answers to be read."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from services.common.counting import counted
from services.likelihood.exports.run_files import flat
from services.likelihood.rest.evaluated.kept import Answer, Kept, Scores, protocol_of
from services.likelihood.rest.evaluated.list_page import asked_of
from services.likelihood.rest.evaluated.of_training import OfTraining
from services.likelihood.rest.evaluated.one_answer import accepted, course, facts, given, verdict
from services.likelihood.rest.evaluated.shell import (
    ON_A_PAGE,
    cell,
    choice,
    framed,
    interval,
    link,
    pager,
    panel,
    search_form,
    share,
    table,
)

F1 = ("F1", "n")
HEADS = [
    ("Questions of", ""),
    ("Exact match", "n"),
    F1,
    ("Questions", "n"),
    ("Searches", "n"),
    ("Answered", "n"),
]


@dataclass(frozen=True)
class Shown:
    """Which answers are shown."""

    show: str = "all"
    """`all`, `right` or `wrong`."""
    source: str | None = None
    find: str = ""
    first: int = 1
    open: int = 0
    """1: the first answer that is shown is unfolded, as a link to an answer has it."""

    def query(self) -> str:
        given = {"show": self.show, "source": self.source, "find": self.find, "first": self.first}
        query = {k: v for k, v in given.items() if v not in (None, "", "all", 1)}
        return "?" + urlencode(query | ({"open": 1} if self.open else {})) + ("#opened" if self.open else "")


def answers_page(
    run: str,
    name: str,
    kept: Kept,
    shown: Shown,
    trained: OfTraining | None = None,
    *,
    compared: str = "",
    there: bool = True,
) -> str:
    """kept: the answers. shown: which of them are on the page. trained: of questions that the run asked while
    it trained. compared: the way to the page beside another evaluation. there: whether the run has a page of
    its own."""
    made = datetime.fromtimestamp(trained.made if trained else kept.file.stat().st_mtime, UTC)
    about = trained.about if trained else protocol_of(kept.file)
    if trained or name.startswith("eval_"):
        said = f"asked while the run trained{f'; {name}' if trained else ''}"
    else:
        said = asked_of(about)
    heading = f"{trained.heading}: held-out questions of {run}" if trained else f"{name} of {run}"
    rows = [("all questions", kept.scores, trained.f1 if trained else None)]
    if len(kept.sources) > 1:
        rows += [(name, one, trained.f1_of(name) if trained else None) for name, one in kept.sources.items()]
    has_f1 = any(one.f1 is not None or f1 is not None for _, one, f1 in rows)
    scores = [_scores(name, one, has_f1, f1) for name, one, f1 in rows]
    parts = [
        panel(
            heading,
            f'<p class="muted under">{html.escape(said)}; {made:%Y-%m-%d %H:%M} UTC</p>',
            table([head for head in HEADS if head != F1 or has_f1], scores),
            compared,
            _protocol(about),
        ),
        _answers(kept, shown),
    ]
    return framed(run, heading, parts, below=True, there=there)


def missing_page(run: str, name: str | None, *, there: bool = True) -> str:
    """Where there is no such run, or no such evaluation of it. there: whether the run has a page."""
    if name is None:
        said = f"<p>No run {html.escape(run)} in this store. {link('/', 'All runs')}</p>"
        return framed(run, f"No run {run}", [panel(f"No run {run}", said)], there=False)
    said = (
        f"<p>{html.escape(run)} has no evaluation {html.escape(name)}. The list has those that there are.</p>"
    )
    parts = [panel(f"No evaluation {name}", said)]
    return framed(run, f"No evaluation {name}", parts, below=True, there=there)


def _scores(name: str, scores: Scores, has_f1: bool, f1: float | None = None) -> str:
    """has_f1: whether the table has its column. f1: where the answers themselves have none."""
    return (
        f'<tr><th scope="row">{html.escape(name)}</th>'
        + cell(share(scores.em), "Exact match", small=interval(*scores.interval))
        + (cell(share(f1 if scores.f1 is None else scores.f1), "F1") if has_f1 else "")
        + cell(f"{scores.n:,}", "Questions")
        + cell(f"{scores.searches:.2f}", "Searches")
        + cell(f"{100 * scores.answered:.0f} %", "Answered")
        + "</tr>"
    )


def _protocol(about: dict[str, Any]) -> str:
    if not about:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{html.escape(key)}</th><td>{html.escape(in_words(value))}</td></tr>'
        for key, value in flat(about, keep_empty=True).items()
    )
    facts = f'<div class="wide"><table class="facts"><tbody>{rows}</tbody></table></div>'
    return f'<details class="how"><summary>How it was asked</summary>{facts}</details>'


def in_words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _answers(kept: Kept, shown: Shown) -> str:
    places = [
        place
        for place, right, source in kept.places
        if shown.show in ("all", "right" if right else "wrong") and shown.source in (None, source)
    ]
    words = shown.find.casefold().split()
    if words:
        found = [(p, a) for p, a in zip(places, kept.read(places), strict=False) if has_words(a, words)]
        places = [place for place, _ in found]
    first = min(shown.first, max(1, len(places)))
    part = places[first - 1 : first - 1 + ON_A_PAGE]
    # The way to an answer names its place among all, whatever is shown now.
    numbers = {place: i for i, (place, _, _) in enumerate(kept.places, 1)}
    rows = "".join(
        _answer(first + i, one, Shown(first=numbers[part[i]], open=1).query(), shown.open == 1 and i == 0)
        for i, one in enumerate(kept.read(part))
    )
    right = sum(right for _, right, _ in kept.places)
    choices = (("all", len(kept.places)), ("right", right), ("wrong", len(kept.places) - right))
    shut = replace(shown, first=1, open=0)
    ways = [
        choice(f"{what} {n:,}", replace(shut, show=what).query(), what == shown.show) for what, n in choices
    ]
    sources = _sources(kept, shut)
    search = search_form(shown.find, "Search the answers", {"show": shown.show, "source": shown.source})
    pages = pager(first, len(part), len(places), lambda row: replace(shut, first=row).query())
    last = first - 1 + len(part)
    said = f"{first:,} to {last:,} of {counted(len(places), 'answer')}" if part else "No such answer."
    return panel(
        "Answers",
        f'<div class="filters choices">{"".join(ways)}{sources}{search}</div>',
        f'<p class="hint">{said} {pages}</p>',
        f'<ol class="answers-read">{rows}</ol>',
        f'<p class="hint">{pages}</p>' if pages else "",
    )


def _sources(kept: Kept, shown: Shown) -> str:
    if len(kept.sources) < 2:
        return ""
    ways = [
        choice(
            "every source" if name is None else name,
            replace(shown, source=name).query(),
            name == shown.source,
        )
        for name in (None, *kept.sources)
    ]
    return '<span class="apart"></span>' + "".join(ways)


def has_words(answer: Answer, words: Sequence[str]) -> bool:
    text = " ".join((answer.question, answer.answer or "", *answer.golden)).casefold()
    return all(word in text for word in words)


def _answer(number: int, one: Answer, at: str, opened: bool) -> str:
    """number: among those that are shown. at: where it can be linked to."""
    shown = ' id="opened"><details open' if opened else "><details"
    return (
        f'<li value="{number}"{shown}><summary>{verdict(one.right)} '
        f'<span class="question" dir="auto">{html.escape(one.question)}</span>'
        f'<span class="given" dir="auto"><b>{html.escape(given(one))}</b> '
        f'<span class="muted">expected: {html.escape(accepted(one))}</span></span>'
        f'</summary><p class="muted">{facts(one)} · {link(at, "link to this answer")}</p>{course(one)}'
        "</details></li>"
    )
