"""Inverted lists in a file of their own beside the index, mapped and not read into memory.

`lists.ivfdata` has list after list, of each the codes and then the rows (int64), as FAISS's own lists on disk
have them. `lists.sizes` has the number of entries of each, int64. FAISS's own form keeps the absolute path of
the lists in the index, so that a folder that is moved could not be opened.

Fast scans (`PQ256x4fs`, product quantisers of 4 bits, 32 codes per instruction) need the codes of a list
interleaved, which FAISS has in memory alone. On the disk they lie as those of the plain type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from retriever_service.errors import IndexInvalid

LISTS_FILE = "lists.ivfdata"
SIZES_FILE = "lists.sizes"
_ROW_BYTES = 8
_FAST_BITS = 4
"""Of a number of a product quantiser's code, in a fast scan."""


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


def plain_type(faiss: Any, made: Any) -> Any:
    """The empty index whose codes lie on the disk: the plain type of one for fast scans, otherwise itself."""
    if not isinstance(made, faiss.IndexIVFPQFastScan):
        return made
    quantiser = made.pq
    plain = faiss.IndexIVFPQ(
        made.quantizer, made.d, made.nlist, quantiser.M, quantiser.nbits, made.metric_type
    )
    for name in ("by_residual", "quantizer_trains_alone", "cp"):
        setattr(plain, name, getattr(made, name))
    plain.referenced_objects = [made]  # whose quantiser it uses
    return plain


def scanned_fast(faiss: Any, index: Any) -> Any:
    """For fast scans: lists of 4 bits per number, interleaved in memory; `index` loses them. Another index is
    returned as it is."""
    if not isinstance(index, faiss.IndexIVFPQ) or index.pq.nbits != _FAST_BITS:
        return index
    fast = faiss.IndexIVFPQFastScan(index)  # it keeps `index`, whose quantiser it uses
    fast.nprobe = index.nprobe
    none = faiss.ArrayInvertedLists(index.nlist, index.code_size)
    index.replace_invlists(none, True)
    none.this.disown()
    return fast


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
