"""Arrays out of an npz body that a stranger sent: what it claims is checked against limits before anything is
inflated."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.lib import format as npy

from services.common.errors import UserError

MAX_UNPACKED = 512 << 20
"""Most bytes that a body may unpack to."""
MAX_RATIO = 200
"""Most bytes that a byte of the body may unpack to, over all of it (padding and repeated ids pack well; bombs
pack a thousandfold) ..."""
SPARE_UNPACKED = 1 << 20
"""... beyond this."""
MAX_ARRAYS = 64
MAX_HEADER = 4096
ACCEPTED = "expected an npz body (numpy.savez, no pickled objects)"
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
"""Readers by version of the format. Their stubs lack `max_header_size`, so the call declares its own type."""
KINDS = "biufUS"
"""Of accepted arrays: booleans, integers, floats and strings."""


@dataclass(frozen=True)
class Entry:
    """One array of an archive, as it is claimed to be."""

    name: str
    file: zipfile.ZipInfo


def unpacked_size(body: bytes) -> int:
    """Bytes that the body claims to unpack to. Raises UserError for what is no npz, or claims too much."""
    with _opened(body) as archive:
        return _claimed(archive, len(body))


def read_arrays(body: bytes) -> dict[str, np.ndarray]:
    """The arrays by name, each of one dimension. Raises UserError for a body that is not whole, or claims too
    much."""
    with _opened(body) as archive:
        _claimed(archive, len(body))
        return {file.filename.removesuffix(".npy"): _array(archive, file) for file in archive.infolist()}


@contextmanager
def _opened(body: bytes) -> Iterator[zipfile.ZipFile]:
    """The archive; whatever goes wrong while it is read becomes one line."""
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            yield archive
    except UserError:
        raise
    except Exception as e:
        # zipfile, zlib, struct and the parser of NumPy's headers each raise their own on a damaged archive.
        raise UserError(f"token arrays: {ACCEPTED}") from e


def _claimed(archive: zipfile.ZipFile, packed: int) -> int:
    files = archive.infolist()
    if len(files) > MAX_ARRAYS:
        raise UserError(f"token arrays: {len(files)} arrays; at most {MAX_ARRAYS} accepted")
    size = sum(file.file_size for file in files)
    most = min(MAX_UNPACKED, SPARE_UNPACKED + MAX_RATIO * packed)
    if size > most:
        raise UserError(
            f"token arrays: {size} bytes when unpacked; at most {most} accepted for {packed} bytes"
        )
    return size


def _array(archive: zipfile.ZipFile, file: zipfile.ZipInfo) -> np.ndarray:
    name = file.filename.removesuffix(".npy")
    with archive.open(file) as entry:
        read_header: Callable[..., tuple[tuple[int, ...], bool, np.dtype]] = HEADERS[npy.read_magic(entry)]
        shape, _, dtype = read_header(entry, max_header_size=MAX_HEADER)
        if len(shape) != 1 or dtype.kind not in KINDS:
            accepted = "one dimension of booleans, numbers or strings"
            raise UserError(f"token arrays: {name[:40]}: expected {accepted}, got {dtype} of shape {shape}")
        if dtype.itemsize == 0 and shape[0]:
            raise UserError(
                f"token arrays: {name[:40]}: {shape[0]} strings of no width; expected a width of at least 1"
            )
        needed = shape[0] * dtype.itemsize
        if not 0 <= needed <= file.file_size:
            raise UserError(f"token arrays: {name[:40]}: {needed} bytes claimed, {file.file_size} there")
        data = entry.read(needed)
        if len(data) != needed or entry.read(
            1
        ):  # the second read sees the end, and checks the archive's checksum
            raise UserError(f"token arrays: {name[:40]}: {needed} bytes claimed, others there")
    return np.frombuffer(data, dtype) if needed else np.zeros(shape, dtype)
