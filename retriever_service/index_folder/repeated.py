"""Ids that stand twice in a corpus, or in an index already: which passages have them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from retriever_service.index_folder.corpus import read_corpus
from retriever_service.index_folder.held_ids import HeldIds
from retriever_service.index_folder.keys import NO_KEYS, CorpusKeys
from retriever_service.index_folder.rows import hash_of

_TOLD_EACH = 20_000


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
) -> dict[int, int | None]:
    """Lines (`Passage.line`) of the passages with the id of an earlier one, and the first line with that id;
    None where `held`, the ids of the index that is added to, has the id. Malformed lines are passed over.

    Takes 8 bytes per passage. Reads the corpus once, and once more where an id stands twice. on_passages:
    told now and then how many passages are read, and `Passage.end` of the last one.
    """
    hashes = array("Q")
    for number, passage in enumerate(read_corpus(corpus, skip_bad=True, keys=keys), 1):
        hashes.append(hash_of(passage.id))
        if number % _TOLD_EACH == 0:
            on_passages(number, passage.end)
    twice = {hashes[at] for at in again(hashes).tolist()}
    if held is not None:
        twice.update(hashes[at] for at in held.hashed(np.frombuffer(hashes, np.uint64)).tolist())
    if not twice:
        return {}
    first: dict[str, int | None] = {}
    found: dict[int, int | None] = {}
    for passage in read_corpus(corpus, skip_bad=True, keys=keys):
        if hash_of(passage.id) in twice:
            if passage.id not in first:
                first[passage.id] = None if held is not None and passage.id in held else passage.line
            line = first[passage.id]
            if line != passage.line:
                found[passage.line] = line
    return found
