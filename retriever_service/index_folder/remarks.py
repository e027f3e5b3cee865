"""What is better known of the passages that an index was made of, though they are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from retriever_service.index_folder.corpus import Passage
from retriever_service.index_folder.keys import title_and_text
from retriever_service.index_folder.passages import no_value_in
from services.common.counting import SHOWN_LEFT_OUT, counted
from services.common.records.columns import NULL_IS_EMPTY, SUCH_AS


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
