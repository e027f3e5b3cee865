"""Inverted lists in a file of their own beside the index, mapped and not read into memory.

`lists.ivfdata` has list after list, of each the codes and then the rows (int64), as FAISS's own lists on disk
have them. `lists.sizes` has the number of entries of each, int64. FAISS's own form keeps the absolute path of
the lists in the index, so that a folder that is moved could not be opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from retriever_service.errors import IndexInvalid

LISTS_FILE = "lists.ivfdata"
SIZES_FILE = "lists.sizes"
_ROW_BYTES = 8


def has_lists(index: Path) -> bool:
    """Whether the lists of this index file lie beside it."""
    return index.with_name(SIZES_FILE).is_file()


def attach(faiss: Any, index: Any, path: Path) -> None:
    """Give an index without entries the lists beside its file. Raises IndexInvalid where they are not its."""
    sizes = np.fromfile(path.with_name(SIZES_FILE), np.uint64)
    lists = path.with_name(LISTS_FILE)
    there = lists.stat().st_size if lists.is_file() else 0
    expected = int(sizes.sum()) * (index.code_size + _ROW_BYTES)
    if len(sizes) != index.nlist or there != expected:
        raise IndexInvalid(
            f"{lists}: {there} bytes and {len(sizes)} lists instead of {expected} and {index.nlist}; build "
            "the index again"
        )
    mapped = faiss.OnDiskInvertedLists(index.nlist, index.code_size, str(lists))
    mapped.read_only = True
    mapped.set_all_lists_sizes(faiss.swig_ptr(sizes))
    mapped.totsize = there
    if there:
        mapped.do_mmap()
    index.replace_invlists(mapped, True)
    mapped.this.disown()
    index.ntotal = int(sizes.sum())


def write_lists(faiss: Any, parts: list[Any], folder: Path) -> None:
    """Write the lists of several indexes as one, list by list."""
    lists = [part.invlists for part in parts]
    sizes = np.zeros(parts[0].nlist, np.uint64)
    with (folder / LISTS_FILE).open("wb") as file:
        for number in range(len(sizes)):
            counts = [one.list_size(number) for one in lists]
            sizes[number] = sum(counts)
            width = parts[0].code_size
            for one, count in zip(lists, counts, strict=True):
                if count:
                    file.write(faiss.rev_swig_ptr(one.get_codes(number), count * width).tobytes())
            for one, count in zip(lists, counts, strict=True):
                if count:
                    file.write(faiss.rev_swig_ptr(one.get_ids(number), count).tobytes())
    sizes.tofile(folder / SIZES_FILE)
