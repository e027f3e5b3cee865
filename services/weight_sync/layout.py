"""Packing of weights into buckets. Sender and receivers compute the same layout from the list of weights
and the bucket's size.

bucket 0  |model.embed_tokens.weight....|                 a tensor larger than a bucket goes alone
bucket 1  |model.layers.0...q_proj.weight..|..|..|..|     each tensor begins at a multiple of ALIGNMENT bytes
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 256
"""Bytes; more than any data type needs, and what GPU copies like."""
_ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "int8": 1,
}

Weight = tuple[str, str, tuple[int, ...]]
"""Name, data type (`bfloat16`), shape."""


@dataclass(frozen=True)
class Piece:
    """One tensor's place in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor inside a uint8 buffer."""
        import torch

        return (
            buffer[self.offset : self.offset + self.nbytes].view(getattr(torch, self.dtype)).view(self.shape)
        )


class Layout:
    """The buckets of a list of weights. `nbytes` counts the weights alone, `largest` is the largest
    bucket."""

    def __init__(self, weights: Sequence[Weight], bucket_bytes: int):
        self.weights = [(name, dtype, tuple(shape)) for name, dtype, shape in weights]
        self.buckets: list[list[Piece]] = []
        self.sizes: list[int] = []
        self.nbytes = 0
        for name, dtype, shape in self.weights:
            nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
            start = -(-self.sizes[-1] // ALIGNMENT) * ALIGNMENT if self.buckets else 0
            if not self.buckets or start + nbytes > bucket_bytes:
                self.buckets.append([])
                self.sizes.append(0)
                start = 0
            self.buckets[-1].append(Piece(name, dtype, shape, start, nbytes))
            self.sizes[-1] = start + nbytes
            self.nbytes += nbytes
        self.largest = max(self.sizes, default=0)

    @property
    def digest(self) -> str:
        """Same digest, same weights in the same order."""
        return hashlib.blake2b(json.dumps(self.weights).encode(), digest_size=12).hexdigest()

    def filled(self, tensors: Iterator[tuple[str, Tensor]], buffers: Sequence[Tensor]) -> Iterator[Tensor]:
        """Pack tensors into the buffers, by turns, cast to the layout's types; yields each bucket when it is
        full.

        A buffer may be overwritten as soon as the next but one bucket is asked for. Raises ValueError where a
        tensor is not the one that the layout expects (an empty one, say, from a parameter that was not
        gathered).
        """
        for number, (pieces, size) in enumerate(zip(self.buckets, self.sizes, strict=True)):
            buffer = buffers[number % len(buffers)]
            for piece in pieces:
                given = next(tensors, None)
                if given is None or given[0] != piece.name or tuple(given[1].shape) != piece.shape:
                    came = "nothing more" if given is None else f"{given[0]} {list(given[1].shape)}"
                    raise ValueError(
                        f"the weights to send should go on with {piece.name} {list(piece.shape)}, "
                        f"and came with {came}"
                    )
                piece.view(buffer).copy_(given[1], non_blocking=True)
            yield buffer[:size]
        if (more := next(tensors, None)) is not None:
            raise ValueError(f"the weights to send go on with {more[0]}, which was not announced")
