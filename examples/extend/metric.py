"""Metrics: the share of queries that nobody else asked in the step, and the calls of tools."""

from services.contracts import Trajectory


def queries(trajectories: list[Trajectory], rewards: list[float]) -> dict[str, float | None]:
    actions = [action for t in trajectories for action in t.actions]
    asked = [a.query for a in actions if a.kind == "search" and a.query]
    calls = sum(a.kind == "tool" for a in actions) / max(1, len(trajectories))
    return {"my/distinct_queries": len(set(asked)) / len(asked) if asked else None, "my/tool_calls": calls}
