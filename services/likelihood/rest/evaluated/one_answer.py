"""One answer as pages show it: its verdict, its searches, what was written."""

from __future__ import annotations

import html

from services.likelihood.rest.evaluated.kept import Answer


def verdict(right: bool) -> str:
    look, sign = ("right", "✓ right") if right else ("wrong", "✗ wrong")
    return f'<span class="verdict {look}">{sign}</span>'


def given(one: Answer) -> str:
    """The answer itself, or that there is none."""
    return "no answer" if one.answer is None else one.answer


def accepted(one: Answer) -> str:
    return " | ".join(one.golden)


def facts(one: Answer) -> str:
    f1 = "" if one.f1 is None else f" · F1 {one.f1:.2f}"
    return html.escape(f"{one.source}{f1} · {one.finish}")


def course(one: Answer) -> str:
    """How it came about: the searches, and the text."""
    asked = "".join(
        f"<li>searched “<bdi>{html.escape(query)}</bdi>”: "
        f"{html.escape(', '.join(documents)) or 'no document'}</li>"
        for query, documents in one.searches
    )
    written = "".join(
        f'<p class="said {html.escape(by)}" dir="auto">{html.escape(text.strip())}</p>'
        for by, text in one.written
    )
    return (f"<ul>{asked}</ul>" if asked else "") + written
