"""The trajectories that a report carries: a bounded set, in the form of the microscope's page."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from services.common.errors import UnspiralError
from services.common.http.addresses import is_http
from services.common.runs.paths import STORE
from services.likelihood.microscope.grid import Filters, StepSamples, heaviest_of, step_samples
from services.likelihood.store.base import LikelihoodStore
from services.likelihood.store.opening import open_store

MOST_STEPS = 4
"""First and last step, and those of the first alarms."""
MOST_TRAJECTORIES = 8
"""Of each group."""
MOST_CHARS = 20_000
"""Of each text; the rest is left out of the file."""
CUT = " [cut in this report]"


def report_samples(
    folder: Path, config: dict[str, Any], alarms: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The worst and the best group of the first and the last step, and of those of the first alarms, of a run
    that lies in `folder`. Empty where its store holds none, or cannot be read: a report needs no store."""
    address = _address(folder, config)
    if address is None:
        return []
    try:
        with closing(open_store(address)) as store:
            return _of_steps(store, _name(folder, config), alarms)
    except UnspiralError:
        return []


def _name(folder: Path, config: dict[str, Any]) -> str:
    section = config.get("run")
    return str(section.get("name") or folder.resolve().name) if isinstance(section, dict) else folder.name


def _address(folder: Path, config: dict[str, Any]) -> str | None:
    """The store of a run: what its configuration names, otherwise the file in its folder."""
    section = config.get("store")
    url = section.get("url") if isinstance(section, dict) else None
    if isinstance(url, str) and url and not is_http(url):
        return url if "://" in url or Path(url.removeprefix("sqlite:")).is_file() else None
    return str(folder / STORE) if (folder / STORE).is_file() else None


def _of_steps(store: LikelihoodStore, run: str, alarms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = list(store.sampled_steps(run))
    if not kept:
        return []
    why = {kept[0]: "first"}
    if len(kept) > 1:
        why[kept[-1]] = "last"
    for alarm in alarms:
        step = max((s for s in kept if s <= alarm["step"]), default=kept[0])
        if len(why) < MOST_STEPS:
            why.setdefault(step, f"alarm {alarm['rule']}")
    rules = [alarm["rule"] for alarm in alarms]
    return [_of_step(store, run, step, why[step], rules) for step in sorted(why)]


def _of_step(store: LikelihoodStore, run: str, step: int, why: str, rules: list[str]) -> dict[str, Any]:
    heads = step_samples(store, run, step, Filters(order="falls"))
    _keep_worst_and_best(heads)
    left = {head.uid for group in heads.groups for head in group.trajectories}
    found = [t for group in heads.groups for t in store.samples(run, step, group.group)]
    every = [head for group in heads.groups for head in group.trajectories]
    return {
        "step": step,
        "why": why,
        "trajectories": [_cut(t.model_dump()) for t in found if t.uid in left],
        "heads": heads.model_dump(),
        "heaviest": {rule: most.model_dump() for rule in rules if (most := heaviest_of(every, rule))},
    }


def _keep_worst_and_best(heads: StepSamples) -> None:
    """Leave the group that lost most, which comes first, and of the others the one with the best rewards."""

    def earned(place: int) -> float:
        return sum(head.reward or 0.0 for head in heads.groups[place].trajectories)

    others = range(1, len(heads.groups))
    best = [max(others, key=earned)] if others else []
    heads.groups = [heads.groups[place] for place in [0, *best] if heads.groups]
    for group in heads.groups:
        group.trajectories.sort(key=lambda head: (head.right is not True, head.change or 0.0))
        right = [head for head in group.trajectories if head.right][: MOST_TRAJECTORIES // 2]
        wrong = [head for head in group.trajectories if not head.right]
        group.trajectories = [*right, *wrong[: MOST_TRAJECTORIES - len(right)]]
    left = [head for group in heads.groups for head in group.trajectories]
    heads.trajectories = heads.matching = len(left)
    heads.kept_groups = len(heads.groups)
    heads.more_groups = 0
    heads.heaviest = heaviest_of(left, None)


def _cut(value: Any) -> Any:
    """A record with its long texts cut."""
    if isinstance(value, str):
        return value if len(value) <= MOST_CHARS else value[:MOST_CHARS] + CUT
    if isinstance(value, dict):
        return {key: _cut(inside) for key, inside in value.items()}
    if isinstance(value, list) and value and not isinstance(value[0], float):
        return [_cut(inside) for inside in value]
    return value
