"""Parts of a page of the docs by their names, so that a test does not depend on what stands before them."""

from __future__ import annotations

import re


def section(page: str, heading: str) -> str:
    """What stands below a heading, with the headings below it, up to the next one of its level or above."""
    (line,) = re.findall(rf"^#+ {re.escape(heading)}$", page, re.M)
    level = len(line.partition(" ")[0])
    below: list[str] = []
    fenced = False
    for one in page.partition(f"{line}\n")[2].splitlines():
        fenced ^= one.lstrip().startswith("```")
        if not fenced and re.match(rf"#{{1,{level}}} ", one):  # in a block of code it is a comment
            break
        below.append(one)
    return "\n".join(below).strip()


def between(page: str, begin: str, end: str) -> str:
    """What stands between two marks, each of which is there once."""
    assert page.count(begin) == page.count(end) == 1, (begin, end)
    return page.partition(begin)[2].partition(end)[0]


def code_block(text: str, language: str) -> str:
    """The only fenced block of a language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)
    return found


def rows(text: str, *begins: str) -> list[list[str]]:
    """Cells of the table rows that begin with one of these."""
    return [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith(begins)
    ]
