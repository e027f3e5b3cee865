"""Names for the tensors of a batch of B trajectories, padded to T positions.

They tell a reader the shape and kind; to the type checker each is a Tensor. `terms.check_shapes` refuses
other shapes where they would broadcast."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

PerToken: TypeAlias = Tensor
"""Floating [B, T]: one value per position. Outside the action mask anything may stand."""
PerTrajectory: TypeAlias = Tensor
"""Floating [B]: one value per trajectory."""
ActionIds: TypeAlias = Tensor
"""int64 [B, T]: index of the token's action in its trajectory (0..T-1), -1 outside the action mask."""
TokenMask: TypeAlias = Tensor
"""bool [B, T]."""
TrajectoryMask: TypeAlias = Tensor
"""bool [B]."""
