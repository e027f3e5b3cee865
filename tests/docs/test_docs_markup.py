"""The built site holds what its sources hold.

Two readers of Markdown differ: Python-Markdown, which makes the site, and CommonMark, as GitHub reads the
same pages. Each page is read by both, and what they make of it is compared: text, blocks of code, headings,
inline code, tables and lists.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from markdown import markdown
from markdown_it import MarkdownIt
from places import ROOT
from test_docs_site import site  # noqa: F401

PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
COMMONMARK = MarkdownIt("commonmark").enable("table")
FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})(?P<said>[^`\n]*)\n(?P<held>.*?)^ {0,3}\1[`~]* *$", re.M | re.S)
COUNTED = ("table", "tr", "th", "td", "li", "ul", "ol", "strong", "em", "img", "br")
TAGS = {*COUNTED, *(f"h{n}" for n in range(1, 7)), "p", "pre", "code", "a", "thead", "tbody", "hr"}


class Read(HTMLParser):
    """What stands in a page's main part: its text, and the parts that are told apart by their tags."""

    def __init__(self, html: str, *, whole: bool = False):
        super().__init__()
        self.within = whole
        self.tags: list[str] = []
        self.open: list[tuple[str, list[str]]] = []
        self.parts: dict[str, list[str]] = {"pre": [], "heading": [], "code": []}
        self.texts: list[str] = []
        self.skipped = False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.within |= named.get("role") == "main"
        if not self.within:
            return
        self.skipped |= tag == "a" and named.get("class") == "headerlink"
        self.tags.append(tag)
        kind = "heading" if re.fullmatch("h[1-6]", tag) else tag
        if kind in self.parts and not (kind == "code" and "pre" in [name for name, _ in self.open]):
            self.open.append((kind, []))

    def handle_endtag(self, tag):
        kind = "heading" if re.fullmatch("h[1-6]", tag) else tag
        if self.open and self.open[-1][0] == kind:
            _, texts = self.open.pop()
            before = f"{tag} " if kind == "heading" else ""
            self.parts[kind].append(before + "".join(texts))
        self.skipped &= tag != "a"
        self.within &= tag != "footer"

    def handle_data(self, data):
        if self.within and not self.skipped:
            self.texts.append(data)
            for _, texts in self.open:
                texts.append(data)


def made(html):
    main = html.split("<footer", 1)[0]
    return Read(re.sub(r'<button class="more".*?</button>', "", main))


def spaced(texts):
    """White space inside of a line of text is one space to a reader."""
    return [" ".join(text.split()) for text in texts]


def page_of(site, source):
    name = "index.html" if source.stem == "index" else f"{source.stem.lower()}/index.html"
    return (site / name).read_text(encoding="utf-8")


def differences(source: str, html: str) -> list[str]:
    """What one of the two has and the other lacks, a line each; none where they say the same."""
    ours, theirs = made(html), Read(COMMONMARK.render(source), whole=True)
    found = []
    blocks = [text.strip("\n") for text in theirs.parts["pre"]]
    if blocks != [text.strip("\n") for text in ours.parts["pre"]]:
        lost = [block for block in blocks if block not in [text.strip("\n") for text in ours.parts["pre"]]]
        found.append(f"blocks of code: {lost}")
    for kind in ("heading", "code"):
        if (here := spaced(ours.parts[kind])) != (there := spaced(theirs.parts[kind])):
            found.append(
                f"{kind}: {[t for t in there if t not in here]}, {[t for t in here if t not in there]}"
            )
    for tag in COUNTED:
        if (numbers := (theirs.tags.count(tag), ours.tags.count(tag)))[0] != numbers[1]:
            found.append(f"<{tag}>: {numbers[0]} of the source, {numbers[1]} on the page")
    if odd := sorted({*theirs.tags, *ours.tags} - TAGS - {"div"}):
        found.append(f"tags in running text: {odd}")
    here, there = ("".join("".join(read.texts).split()) for read in (ours, theirs))
    if here != there:
        at = next((i for i, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), -1)
        found.append(f"text: {there[max(0, at - 40) : at + 40]!r}, {here[max(0, at - 40) : at + 40]!r}")
    return found


@pytest.mark.parametrize("source", PAGES, ids=lambda p: p.stem)
def test_a_page_of_the_site_holds_what_its_source_holds(source, site):
    assert differences(source.read_text(encoding="utf-8"), page_of(site, source)) == []


@pytest.mark.parametrize("source", PAGES, ids=lambda p: p.stem)
def test_every_fence_is_one_block_of_code_and_no_tag_is_lost(source, site):
    """The same without a second reader: fences and tags are counted in the source itself."""
    text, page = source.read_text(encoding="utf-8"), made(page_of(site, source))
    held = [match["held"].strip("\n") for match in FENCE.finditer(text)]
    blocks = [block.strip("\n") for block in page.parts["pre"]]
    assert [block for block in held if block not in blocks] == []
    assert len(re.findall(r"^\s*(?:```|~~~)", text, re.M)) == 2 * len(held), "a fence begins at the margin"
    for tag in ("think", "search", "information", "answer", "tool_call", "calculator"):
        for mark in (f"<{tag}>", f"</{tag}>"):
            assert "".join(page.texts).count(mark) == text.count(mark), mark


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("```questions jsonl\n{}\n```\n\n## Corpora\n", "blocks of code: ['{}']"),
        ("- one\n\n  ```yaml\n  a: 1\n  ```\n- two\n", "blocks of code: ['a: 1']"),
        ("```tsv\na\tb\n```\n", "blocks of code: ['a\\tb']"),
        (
            "It writes <search> and <answer>.\n",
            "tags in running text: ['answer', 'search']",
        ),
        ("Text\n- one\n- two\n", "<li>: 2 of the source, 0 on the page"),
    ],
)
def test_what_the_two_readers_take_differently_is_noticed(source, said):
    html = markdown(source, extensions=["tables", "fenced_code"])
    assert said in differences(source, f'<div role="main">{html}</div>')
