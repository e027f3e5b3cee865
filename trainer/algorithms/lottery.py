"""Random numbers for tokens that depend on neither micro-batch nor rank."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.shapes import PerToken

_SIGNED = 1 << 64


def _signed(value: int) -> int:
    """The 64-bit number as int64 has it."""
    value %= _SIGNED
    return value - _SIGNED if value >= _SIGNED // 2 else value


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right with zeros from the left, which int64 has no operation for."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def token_lottery(rows: Tensor, width: int, seed: int) -> PerToken:
    """A number in [0, 1) for each of `width` positions of each row, float64 [B, width].

    rows int64 [B]: the index of each row in its batch. The same row, position and seed have the same number
    wherever they are computed (splitmix64's mixing function)."""
    columns = torch.arange(width, device=rows.device)
    # Products of int64 wrap around, as the unsigned ones of splitmix64 do.
    x = rows[:, None] * _signed(0x9E3779B97F4A7C15) + columns[None] * _signed(0xD1B54A32D192ED03)
    x = x + _signed(seed * 0x8CB92BA72F3D8DD7)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ _shifted(x, 31)
    # The highest 53 bits: as many as a float64 holds exactly.
    return _shifted(x, 11).double() / (1 << 53)
