"""Ids that stand twice in a corpus, or in an index already: which passages have them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retriever_service.index_folder.corpus import Passage, read_corpus
from retriever_service.index_folder.held_ids import HeldIds
from retriever_service.index_folder.keys import NO_KEYS, CorpusKeys
from retriever_service.index_folder.rows import hash_of

_TOLD_EACH = 20_000
IN_INDEX = 0
"""In place of a line: the passage of that id is one of the index that is added to."""


@dataclass(frozen=True)
class Repeated:
    """The passages of a corpus whose id another passage has, which is kept."""

    lines: dict[int, int]
    """Lines (`Passage.line`) of those with the id of an earlier one, and the first line with that id."""
    held: HeldIds | None
    """The ids of the index that is added to."""
    suspects: np.ndarray
    """uint64, sorted: the hashes of ids which `held` may have. Few look-ups in the index are in vain."""

    def kept(self, passage: Passage) -> int | None:
        """The line of the passage that is kept in place of this one, or IN_INDEX; None: this one is kept."""
        if self.held is not None and self._is_suspect(passage.id) and passage.id in self.held:
            return IN_INDEX
        return self.lines.get(passage.line)

    def _is_suspect(self, identity: str) -> bool:
        if not len(self.suspects):
            return False
        wanted = np.uint64(hash_of(identity))
        place = min(int(np.searchsorted(self.suspects, wanted)), len(self.suspects) - 1)
        return bool(self.suspects[place] == wanted)


def again(hashes: array[int]) -> np.ndarray:
    """Positions of the hashes that stand before too, in rising order."""
    found = np.frombuffer(hashes, np.uint64)
    order = np.argsort(found, kind="stable")
    same = found[order][1:] == found[order][:-1]
    return np.sort(order[1:][same])


def repeated_ids(
    corpus: Path,
    on_passages: Callable[[int, int], None],
    held: HeldIds | None = None,
    keys: CorpusKeys = NO_KEYS,
) -> Repeated:
    """Look for the ids that stand twice in a corpus, or in `held` too. Malformed lines are passed over.

    Takes about 40 bytes per passage at the peak, and after it 8 for each that the index has; beside these
    some hundred for each passage with the id of an earlier one. Reads the corpus once, and once more where an
    id stands twice in it. on_passages: told now and then how many passages are read, and `Passage.end` of
    the last one.
    """
    read = array("Q")
    placing = held is None  # an addition needs ids
    for number, passage in enumerate(read_corpus(corpus, skip_bad=True, keys=keys, placing=placing), 1):
        read.append(hash_of(passage.id))
        if number % _TOLD_EACH == 0:
            on_passages(number, passage.end)
    hashes = np.frombuffer(read, np.uint64)
    suspects = np.unique(hashes[held.hashed(hashes)]) if held is not None else np.empty(0, np.uint64)
    twice = {read[at] for at in again(read).tolist()}
    return Repeated(_lines_again(corpus, twice, keys), held, suspects)


def _lines_again(corpus: Path, twice: set[int], keys: CorpusKeys) -> dict[int, int]:
    """`Repeated.lines`, by the hashes of ids that may stand twice."""
    if not twice:
        return {}
    first: dict[str, int] = {}
    found: dict[int, int] = {}
    for passage in read_corpus(corpus, skip_bad=True, keys=keys):
        if hash_of(passage.id) in twice:
            line = first.setdefault(passage.id, passage.line)
            if line != passage.line:
                found[passage.line] = line
    return found
