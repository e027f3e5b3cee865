"""What is better known of the passages that an index was made of, though they are kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from retriever_service.index_folder.corpus import Passage
from retriever_service.index_folder.keys import NO_KEYS, CorpusKeys, title_and_text
from retriever_service.index_folder.passages import no_value_in
from services.common.counting import SHOWN_LEFT_OUT, counted
from services.common.records import field_of, read_records
from services.common.records.columns import CONTENTS, IDENTITY, NULL_IS_EMPTY, SUCH_AS, plain_name


@dataclass
class Remarks:
    """Counts, and the first of each kind."""

    placed: int = 0
    """Passages without an id in a corpus with ids."""
    first_placed: list[str] = field(default_factory=list)
    no_value: int = 0
    """Passages whose text, title or id is what tables hold where there is nothing, such as NULL."""
    first_no_value: list[str] = field(default_factory=list)

    def see(self, passage: Passage, where: str) -> None:
        """Look at one passage. where: its file and what `Passage.line` counts."""
        if passage.placed:
            self.placed += 1
            if self.placed <= SHOWN_LEFT_OUT:
                self.first_placed.append(f"{where} {passage.line}: {no_id(passage.id)}")
        what = no_value_in(*title_and_text(passage.contents), passage.id)
        if what is not None:
            self.no_value += 1
            if self.no_value <= SHOWN_LEFT_OUT:
                self.first_no_value.append(f"{where} {passage.line}: of the passage {passage.id!r} {what}")

    def take(self, fields: Mapping[str, Any]) -> None:
        """Become those with these fields, as a scan keeps them."""
        for name, value in fields.items():
            setattr(self, name, value)

    def lines(self) -> Iterator[str]:
        """For a command that has made the index."""
        if self.placed:
            yield f"{placed_said(self.placed)}{_first(self.placed)}:"
            yield from self.first_placed
        if self.no_value:
            yield f"{no_value_said(self.no_value)}, and kept{_first(self.no_value)}:"
            yield from self.first_no_value
            yield NULL_IS_EMPTY.format("retriever")


def _first(count: int) -> str:
    return f"; the first {SHOWN_LEFT_OUT}" if count > SHOWN_LEFT_OUT else ""


def no_id(named: str) -> str:
    """What is said of one passage that is named by its place."""
    return f"no id; its place names it {named!r}"


def placed_said(count: int) -> str:
    """Passages without an id, in a corpus with ids."""
    return counted(
        count,
        "passage has no id and is named by its place",
        "passages have no id and are named by their place",
    )


def no_value_said(count: int, one: str = "passage") -> str:
    """Passages that hold what tables hold where there is nothing. one: what is counted."""
    held = f"a text, a title or an id such as {SUCH_AS}"
    return counted(count, f"{one} has {held}", f"{one}s have {held}")


def other_columns(corpus: str | Path, keys: CorpusKeys = NO_KEYS) -> str | None:
    """A line where no column of a corpus is read as the title, or as the id, and others of its first row may
    be that by another name."""
    first = next((one.fields for one in read_records(corpus) if one.fields is not None), None)
    row = keys.applied(first) if first is not None else {}
    text = field_of(row, CONTENTS)
    if text is None:
        return None
    plain = {plain_name(name) for name in row}
    # A title is the first line of `contents`, where there is one.
    lacks = [] if "title" in plain or plain_name(text[0]) in ("contents", "content") else ["title"]
    lacks += ["id"] if plain.isdisjoint(IDENTITY) else []
    others = [
        str(name)
        for name, held in row.items()
        if plain_name(name) not in (*CONTENTS, *IDENTITY, "title", "url")
        and (held is None or isinstance(held, str | int | float))
    ]
    if not lacks or not others:
        return None
    options = " and ".join(f"--{name}-key" for name in lacks)
    of_run = " and ".join(f"retriever.{name}_key" for name in lacks)
    return (
        f"{corpus}: no column is called {' or '.join(lacks)}; {options} (of a run: {of_run}) may name one of "
        f"the others: {', '.join(others)}"
    )


_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
"""Letters of scripts whose words stand side by side: Thai, Lao, Burmese, Khmer, Japanese, Chinese."""
_UNSPACED_WORD = re.compile(rf"\w*[{_UNSPACED}]\w*")
FIRST_PASSAGES = 20
LONG_WORD = 6.0
"""Mean letters of such words from which on they are phrases; those that a program has set apart have two."""


def unspaced(corpus: str | Path, keys: CorpusKeys = NO_KEYS) -> str | None:
    """A line where the first passages have no spaces between words: BM25 takes each phrase for one word."""
    rows = (keys.applied(one.fields) for one in read_records(corpus) if one.fields is not None)
    found = (field_of(row, CONTENTS) for row in islice(rows, FIRST_PASSAGES))
    texts = [one[1] for one in found if one is not None and isinstance(one[1], str)]
    phrases = [phrase for text in texts for phrase in _UNSPACED_WORD.findall(text)]
    letters = sum(map(len, phrases))
    of_all = sum(len(word) for text in texts for word in text.split())
    if not phrases or letters < of_all / 3 or letters / len(phrases) < LONG_WORD:
        return None
    return (
        f"{corpus}: its text has no spaces between words, so BM25 takes a whole phrase for one word and "
        "finds little; --backend dense searches such text, or put spaces between its words and those of the "
        "questions"
    )


def of_build(corpus: str | Path, keys: CorpusKeys, backend: str) -> Iterator[str]:
    """Lines for `index build`, of columns that were not read, and of text that BM25 does not divide."""
    lines = (other_columns(corpus, keys), unspaced(corpus, keys) if backend == "bm25" else None)
    yield from filter(None, lines)
