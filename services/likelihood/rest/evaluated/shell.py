"""The frame of the pages about evaluations."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from urllib.parse import quote, urlencode

from services.common.validation import number_of

ON_A_PAGE = 50
"""Answers, or pairs of them."""
PAGE = Path(__file__).parents[2] / "static" / "evaluations.html"


def framed(run: str, title: str, parts: Iterable[str], *, below: bool = False, there: bool = True) -> str:
    """A page with the ways back to the run, and, below the list, to the list. there: whether the run has a
    page; where nothing was trained, the way leads to all runs."""
    back = f"/#runs={quote(quote(run))}" if there else "/"
    ways = [link(back, f"← run {run}" if there else "← all runs")]
    if below:
        ways.append(link(f"/runs/{quote(run)}/evaluations", f"evaluations of {run}"))
    text = PAGE.read_text(encoding="utf-8")
    for place, part in {
        "<!--title-->": html.escape(title),
        "<!--run-href-->": back,
        "<!--ways-->": "".join(ways),
        "<!--parts-->": "\n".join(parts),
    }.items():
        text = text.replace(place, part)
    return text


def link(to: str, text: str) -> str:
    return f'<a href="{html.escape(to)}">{html.escape(text)}</a>'


def page_of(run: str, name: str) -> str:
    return f"/runs/{quote(run)}/evaluations/{quote(name)}"


def compared_at(run: str, name: str, before: str) -> str:
    """The address of the page of both. before: a name, or RUN/NAME of another run."""
    return f"{page_of(run, name)}/beside?{urlencode({'before': before})}"


def choice(text: str, to: str, chosen: bool) -> str:
    current = ' aria-current="true"' if chosen else ""
    return f'<a class="choice" href="{html.escape(to)}"{current}>{html.escape(text)}</a>'


def search_form(find: str, what: str, kept: Mapping[str, str | None]) -> str:
    """A search for words. kept: what else the address says, and says again."""
    hidden = "".join(
        f'<input type="hidden" name="{key}" value="{html.escape(value)}">'
        for key, value in kept.items()
        if value
    )
    return (
        f'<form role="search">{hidden}<input type="search" name="find" value="{html.escape(find)}" '
        f'placeholder="words of question or answer" aria-label="{html.escape(what)}">'
        "<button>Search</button></form>"
    )


def pager(first: int, shown: int, total: int, at: Callable[[int], str]) -> str:
    """The ways to the rows before and after these, of which `first` is the first. at: the address of the page
    that begins with a row."""
    ways = []
    if first > 1:
        ways.append(link(at(max(1, first - ON_A_PAGE)), "← previous"))
    if first - 1 + shown < total:
        ways.append(link(at(first + shown), "next →"))
    return " ".join(ways)


def panel(heading: str, *parts: str) -> str:
    return f'<section class="panel"><h2>{html.escape(heading)}</h2>{"".join(parts)}</section>'


def hint(text: str) -> str:
    """text: HTML."""
    return f'<p class="hint">{text}</p>'


def table(heads: Iterable[tuple[str, str]], rows: Iterable[str], kind: str = "listed") -> str:
    """heads: each with its class, `n` for numbers; rows: HTML."""
    head = "".join(f'<th scope="col" class="{look}">{html.escape(text)}</th>' for text, look in heads)
    body = "".join(rows)
    parts = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="wide"><table class="{kind}">{parts}</table></div>'


def cell(text: str, label: str = "", look: str = "n", small: str = "") -> str:
    below = f'<small class="muted">{html.escape(small)}</small>' if small else ""
    return (
        f'<td class="{look}" data-label="{html.escape(label)}"><span>{html.escape(text)}{below}</span></td>'
    )


def share(value: object) -> str:
    """Three digits, or a dash where nothing is known."""
    number = number_of(value)
    return "–" if number is None else f"{number:.3f}"


def interval(low: object, high: object) -> str:
    return "" if number_of(low) is None or number_of(high) is None else f"{share(low)}–{share(high)}"
