"""Two evaluations beside each other, question by question: what turned right, what turned wrong."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlencode

from services.common.counting import counted
from services.common.shares import is_clear
from services.likelihood.rest.evaluated.answers_page import Shown, has_words, in_words
from services.likelihood.rest.evaluated.kept import Answer
from services.likelihood.rest.evaluated.one_answer import accepted, course, facts, given, verdict
from services.likelihood.rest.evaluated.pairs import TURNS, Pair, Pairs, Side, command_of
from services.likelihood.rest.evaluated.shell import (
    ON_A_PAGE,
    cell,
    choice,
    framed,
    interval,
    link,
    page_of,
    pager,
    panel,
    search_form,
    share,
    table,
)

HEADS = [
    ("Evaluation", ""),
    ("Exact match", "n"),
    ("Searches", "n"),
    ("Answered", "n"),
]
TURN_HEADS = [("Questions of", ""), *((text.capitalize(), "n") for text in TURNS.values())]
SIGNS = {
    "turned_wrong": ("wrong", "✓→✗ turned wrong"),
    "turned_right": ("right", "✗→✓ turned right"),
    "wrong": ("", "✗ wrong in both"),
    "right": ("", "✓ right in both"),
}


@dataclass(frozen=True)
class ShownPairs:
    """Which of the pairs are shown. before: as an address has it."""

    before: str
    show: str = "all"
    """`all`, or one of `TURNS`."""
    source: str | None = None
    find: str = ""
    first: int = 1

    def query(self) -> str:
        said = {"before": self.before, "show": self.show, "source": self.source, "find": self.find}
        query = {k: v for k, v in said.items() if v not in (None, "", "all")}
        return "?" + urlencode(query | ({"first": self.first} if self.first > 1 else {}))


def compared_page(
    pairs: Pairs, shown: ShownPairs, choices: Sequence[tuple[str, str]], *, there: bool = True
) -> str:
    """choices: what `before` can be, with the words for it. there: whether the run has a page."""
    before, after = pairs.before, pairs.after
    of = after.run if before.run == after.run else f"{before.run} and {after.run}"
    heading = f"{before.label} → {after.label}: questions of {of}"
    sides = table(HEADS, [_side(side) for side in (before, after)])
    parts = [_chooser(after, shown.before, choices)]
    if not pairs.all:
        parts += ["<p>No question with the same words and accepted answers is in both.</p>", sides]
        return framed(after.run, heading, [panel(heading, *parts)], below=True, there=there)
    parts += [_change(pairs), sides, table(TURN_HEADS, _turns(pairs)), *_notes(pairs)]
    return framed(after.run, heading, [panel(heading, *parts), _list(pairs, shown)], below=True, there=there)


def chooser(action: str, chosen: str | None, choices: Sequence[tuple[str, str]], what: str) -> str:
    """The form that leads to this page."""
    options = "".join(
        f'<option value="{html.escape(value)}"{" selected" if value == chosen else ""}>'
        f"{html.escape(text)}</option>"
        for value, text in choices
    )
    return (
        f'<form class="chooser" action="{html.escape(action)}"><label>{html.escape(what)} '
        f'<select name="before">{options}</select></label> <button>Compare</button></form>'
    )


def _chooser(after: Side, chosen: str, choices: Sequence[tuple[str, str]]) -> str:
    return chooser(f"{page_of(after.run, after.name)}/beside", chosen, choices, "Before:")


def _side(side: Side) -> str:
    scores = side.kept.scores
    below = f'<small class="muted">{html.escape(f"{side.run}, {side.name}")}</small>'
    return (
        f'<tr><th scope="row">{link(page_of(side.run, side.name), side.label)}{below}</th>'
        + cell(share(scores.em), "Exact match", small=interval(*scores.interval))
        + cell(f"{scores.searches:.2f}", "Searches")
        + cell(f"{100 * scores.answered:.0f} %", "Answered")
        + "</tr>"
    )


def _change(pairs: Pairs) -> str:
    (first, last), (low, high) = pairs.shares, pairs.interval
    clear = is_clear((low, high))
    word = ("↑ up" if last > first else "↓ down") if clear else "no clear change"
    n = counted(len(pairs.all), "question")
    return (
        f'<p class="change-said"><strong>{word}</strong> from {share(first)} to {share(last)} on the {n} of '
        f"both: {signed(last - first)}, 95 % interval {signed(low)} to {signed(high)}, of the pairs.</p>"
    )


def signed(value: float) -> str:
    return f"{'−' if value < 0 else '+'}{abs(value):.3f}"


def _turns(pairs: Pairs) -> Iterable[str]:
    yield _turn_row("all", pairs.all)
    sources = sorted({pair.source for pair in pairs.all})
    if len(sources) > 1:
        for source in sources:
            yield _turn_row(source, [pair for pair in pairs.all if pair.source == source])


def _turn_row(name: str, part: Sequence[Pair]) -> str:
    cells = [cell(f"{sum(one.turn == turn for one in part):,}", TURNS[turn].capitalize()) for turn in TURNS]
    return f'<tr><th scope="row">{html.escape(name)}</th>{"".join(cells)}</tr>'


def _notes(pairs: Pairs) -> Iterable[str]:
    for side, alone in zip((pairs.before, pairs.after), pairs.alone, strict=True):
        if alone:
            are = counted(alone, "question is", "questions are")
            yield f'<p class="hint">{are} in {html.escape(side.label)} alone, and left out.</p>'
    differ = pairs.asked_differently()
    if differ:
        said = "; ".join(f"{key}: {in_words(a)} → {in_words(b)}" for key, a, b in differ)
        yield f'<p class="opposite">Asked differently: {html.escape(said)}</p>'
    if command := command_of(pairs):
        yield f'<p class="hint">In a terminal: <code>{html.escape(command)}</code></p>'


def _list(pairs: Pairs, shown: ShownPairs) -> str:
    of_source = [pair for pair in pairs.all if shown.source in (None, pair.source)]
    chosen = [pair for pair in of_source if shown.show in ("all", pair.turn)]
    words = shown.find.casefold().split()
    if words:
        read = zip(chosen, _read(pairs, chosen), strict=False)
        chosen = [pair for pair, both in read if any(has_words(one, words) for one in both)]
    first = min(shown.first, max(1, len(chosen)))
    part = chosen[first - 1 : first - 1 + ON_A_PAGE]
    counts = {"all": len(of_source)} | {turn: sum(pair.turn == turn for pair in of_source) for turn in TURNS}
    begun = replace(shown, first=1)
    ways = [
        choice(f"{TURNS.get(what, what)} {n:,}", replace(begun, show=what).query(), what == shown.show)
        for what, n in counts.items()
    ]
    sources = sorted({pair.source for pair in pairs.all})
    if len(sources) > 1:
        ways.append('<span class="apart"></span>')
        ways += [
            choice(one or "every source", replace(begun, source=one).query(), one == shown.source)
            for one in (None, *sources)
        ]
    kept = {"before": shown.before, "show": shown.show, "source": shown.source}
    search = search_form(shown.find, "Search questions and answers", kept)
    pages = pager(first, len(part), len(chosen), lambda row: replace(shown, first=row).query())
    last = first - 1 + len(part)
    said = f"{first:,} to {last:,} of {counted(len(chosen), 'question')}" if part else "No such question."
    rows = "".join(_row(pairs, pair, both) for pair, both in zip(part, _read(pairs, part), strict=False))
    return panel(
        "Question by question",
        f'<div class="filters choices">{"".join(ways)}{search}</div>',
        f'<p class="hint">{said} {pages}</p>',
        f'<ol class="answers-read pairs">{rows}</ol>',
        f'<p class="hint">{pages}</p>' if pages else "",
    )


def _read(pairs: Pairs, chosen: Sequence[Pair]) -> Iterable[tuple[Answer, Answer]]:
    before, after = pairs.before.kept, pairs.after.kept
    return zip(
        before.read([before.places[pair.before][0] for pair in chosen]),
        after.read([after.places[pair.after][0] for pair in chosen]),
        strict=False,
    )


def _row(pairs: Pairs, pair: Pair, both: tuple[Answer, Answer]) -> str:
    look, sign = SIGNS[pair.turn]
    one = both[1]
    said = " → ".join(f"<b>{html.escape(given(answer))}</b>" for answer in both)
    sides = "".join(
        _text(side, number, answer)
        for side, number, answer in zip(
            (pairs.before, pairs.after), (pair.before, pair.after), both, strict=True
        )
    )
    return (
        f'<li><details><summary><span class="verdict {look}">{sign}</span> '
        f'<span class="question" dir="auto">{html.escape(one.question)}</span>'
        f'<span class="given" dir="auto"><span>{said}</span> '
        f'<span class="muted">expected: {html.escape(accepted(one))}</span></span></summary>'
        f'<div class="both">{sides}</div></details></li>'
    )


def _text(side: Side, number: int, one: Answer) -> str:
    at = page_of(side.run, side.name) + Shown(first=number + 1, open=1).query()
    said = f"{verdict(one.right)} <b>{html.escape(given(one))}</b>"
    about = f'<span class="muted">{facts(one)} · {link(at, "this answer alone")}</span>'
    return f"<section><h3>{html.escape(side.label)}</h3><p>{said} {about}</p>{course(one)}</section>"
