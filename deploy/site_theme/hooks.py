"""What the site's Markdown would else change in a page, and the README as a page of the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

TAB = "\ue009"
"""Stands for a tab until the page is made: Python-Markdown makes spaces of it, and a table with tabs that a
reader copies from a block of code would be none any more."""
README = "readme.md"
ROOT = Path(__file__).parents[2]


def readme() -> str:
    """The README with links as from docs/. One that leads to a file outside of docs/ stays as its words."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(?<=\]\()docs/", "", text)
    return re.sub(r"(?<!!)\[([^\]\[]+)\]\((?:[A-Z]+\.md|LICENSE)(?:#[\w-]+)?\)", r"\1", text)


def on_files(files: Any, config: Any) -> Any:
    files.append(File.generated(config, README, content=readme()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace("](../README.md", f"]({README}").replace("\t", TAB)


def on_page_content(html: str, **_: Any) -> str:
    return html.replace(TAB, "\t")
