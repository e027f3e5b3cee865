"""A reward: exact match, less a tenth for every search after the first."""

from services.contracts import Trajectory
from trainer.rewards import em


def frugal(trajectory: Trajectory) -> float:
    return em(trajectory) * max(0.5, 1.0 - 0.1 * max(0, trajectory.searches - 1))


frugal.right_at = 0.5  # type: ignore[attr-defined]  # the least that a right answer earns
