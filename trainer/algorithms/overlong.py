"""DAPO's soft penalty on responses that come near the length limit."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.shapes import PerTrajectory


def overlong_penalty(
    lengths: Tensor, *, max_tokens: int, zone_tokens: int, penalty: float = 1.0
) -> PerTrajectory:
    """What to add to each reward (arXiv 2503.14476, eq. 13): 0 up to `max_tokens - zone_tokens`, falling in a
    straight line to `-penalty` at `max_tokens`, and `-penalty` beyond.

    lengths [B]: model tokens of each trajectory. `zone_tokens` 0 is off. Result fp32 [B]. Raises ValueError
    unless 0 <= zone_tokens <= max_tokens.

    >>> overlong_penalty(torch.tensor([70, 80, 90, 100, 120]), max_tokens=100, zone_tokens=20)
    tensor([ 0.0000,  0.0000, -0.5000, -1.0000, -1.0000])
    """
    if not 0 <= zone_tokens <= max_tokens:
        raise ValueError(f"zone_tokens must lie in 0..max_tokens={max_tokens}, not {zone_tokens}")
    if zone_tokens == 0:
        return torch.zeros(lengths.shape, dtype=torch.float32, device=lengths.device)
    over = (lengths.float() - (max_tokens - zone_tokens)) / zone_tokens
    # Not `-penalty * ...`, which is -0.0 for a short answer, and is printed so.
    return 0.0 - penalty * over.clamp(0, 1)
