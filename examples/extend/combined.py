"""A reward of several parts, and each part as a metric."""

from services.contracts import Trajectory
from trainer.rewards import em


def sparing(trajectory: Trajectory) -> float:
    return float(1 <= trajectory.searches <= 2)


PARTS = {"em": (0.8, em), "sparing": (0.2, sparing)}


def combined(trajectory: Trajectory) -> float:
    return sum(weight * part(trajectory) for weight, part in PARTS.values())


def parts(trajectories: list[Trajectory], rewards: list[float]) -> dict[str, float]:
    means = {name: sum(map(part, trajectories)) / len(trajectories) for name, (_, part) in PARTS.items()}
    return {f"my/{name}": mean for name, mean in means.items()}


combined.right_at = 0.8  # type: ignore[attr-defined]  # what a right answer earns without the other parts
