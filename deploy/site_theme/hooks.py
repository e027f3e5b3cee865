"""What the site's Markdown would else change in a page."""

from typing import Any

TAB = "\ue009"
"""Stands for a tab until the page is made: Python-Markdown makes spaces of it, and a table with tabs that a
reader copies from a block of code would be none any more."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace("\t", TAB)


def on_page_content(html: str, **_: Any) -> str:
    return html.replace(TAB, "\t")
