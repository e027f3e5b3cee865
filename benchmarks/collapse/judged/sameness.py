"""Whether cells can be compared (PLAN.md, "Same bits"): warm starts and first batches of a seed, kinds of
machine, and cells that were run twice."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Collection, Hashable, Iterable

from benchmarks.collapse.judged.collected import Result, Results
from benchmarks.collapse.judged.outcomes import PRIMARY
from benchmarks.collapse.judged.statistics import interval
from benchmarks.collapse.planned.arms import ARMS

NOT_NOTED = "not noted"
"""Ends the processor of a cell that does not name it."""
NOTHING_CONCLUDED = "Nothing is concluded from them before the cause is found (PLAN.md)."


def samples_ahead(arm: str) -> bool:
    return bool(ARMS[arm].settings.get("rollout.max_staleness"))


def faults(results: Results, arms: Collection[str] = tuple(ARMS)) -> list[str]:
    """Seeds whose warm starts or first batches are not equal in all of these arms. Arms that sample ahead are
    left out of the second: what shares the engine's batches with theirs depends on timing. A warm start
    whose checksum was not kept is unknown, and equal to any."""
    mine = {arm: results[arm] for arm in arms if arm in results}
    starts, batches = [], []
    for seed in sorted({seed for of_arm in mine.values() for seed in of_arm}):
        cells = {arm: of_arm[seed] for arm, of_arm in mine.items() if seed in of_arm}
        if _several(start for cell in cells.values() if (start := cell.header["warm_start"])):
            starts.append(seed)
        if _several(cell.first_batch() for arm, cell in cells.items() if not samples_ahead(arm)):
            batches.append(seed)
    named = (("warm starts", starts), ("first batches", batches))
    return [f"the {what} of {seeds_in_words(odd)} differ" for what, odd in named if odd]


def first_batches(results: Results) -> str:
    """What is known of warm starts and first batches, in a sentence or two."""
    if odd := faults(results):
        return f"{_sentence('; '.join(odd))} {NOTHING_CONCLUDED}"
    seeds = Counter(seed for of_arm in results.values() for seed in of_arm)
    if all(count < 2 for count in seeds.values()):
        return "No seed has two arms yet: warm starts and first batches are not compared."
    return "All arms of each seed share the warm start and the first batch."


def kinds(results: Results, arms: Collection[str] = tuple(ARMS)) -> dict[str, Counter[str]]:
    """Cells by kind of machine and by arm."""
    found: dict[str, Counter[str]] = {}
    for arm in arms:
        for cell in results.get(arm, {}).values():
            found.setdefault(kind(cell), Counter())[arm] += 1
    return found


def kind(cell: Result) -> str:
    """Processor and package versions, in words."""
    known = dict(cell.header.get("versions", {}))
    processor = known.pop("processor", "processor not recorded")
    machine = known.pop("machine", "machine not recorded")
    return ", ".join([machine, processor, *(f"{name} {number}" for name, number in known.items())])


def noted(cell: Result) -> dict[str, str]:
    """What is known of a cell's machine: a processor whose name was not noted is not."""
    known = dict(cell.header.get("versions", {}))
    return {name: value for name, value in known.items() if not value.endswith(NOT_NOTED)}


def several_kinds(results: Results, arms: Collection[str] = tuple(ARMS)) -> str | None:
    """How many kinds of machine these cells are of, in words: `2` where each two kinds have a difference that
    was noted, `several` where some have, and "" where none has. None: one kind."""
    notes = {kind(cell): noted(cell) for arm in arms for cell in results.get(arm, {}).values()}
    if len(notes) < 2:
        return None
    apart = [
        any(a[name] != b[name] for name in a.keys() & b.keys())
        for a, b in itertools.combinations(notes.values(), 2)
    ]
    return str(len(notes)) if all(apart) else "several" if any(apart) else ""


def machines(results: Results) -> str:
    """The kinds of machine, in a sentence or two; empty without a cell."""
    found = kinds(results)
    if len(found) < 2:
        return "".join(f"All cells are of one kind of machine ({name})." for name in found)
    parts = "; ".join(
        f"{name}: {', '.join(f'`{arm}` ({count})' for arm, count in arms.items())}"
        for name, arms in found.items()
    )
    if count := several_kinds(results):
        said = f"Against PLAN.md, cells are of {count} kinds of machine, between which bits may differ"
    else:
        said = "PLAN.md asks for one kind of machine; the cells' notes do not say whether theirs is one"
    return f"{said}: {parts}."


def mixed(results: Results, arms: Collection[str]) -> str:
    """The clause that a conclusion from these arms needs where they are not of one kind of machine."""
    count = several_kinds(results, arms)
    if count is None:
        return ""
    if count:
        return f" Against PLAN.md, these cells are of {count} kinds of machine."
    return " Whether these cells are of one kind of machine, as PLAN.md asks, was not noted."


def repeats_table(results: Results, repeats: Results) -> str:
    """A row per cell that was run a second time: whether the bits are the same, and otherwise by how much the
    primary outcome differs."""
    if not any(repeats.values()):
        return "No cell was run a second time yet."
    lines = [
        "| cell | same warm start | same bits | first step with another reward | EM sampled, steps 60 to "
        "150: here | in the other run | difference | machine of the other run |",
        "| --- " * 8 + "|",
    ]
    for arm in (arm for arm in ARMS if arm in repeats):
        for seed, again in sorted(repeats[arm].items()):
            first = results.get(arm, {}).get(seed)
            lines.append(f"| {' | '.join(_repeat(arm, seed, first, again))} |")
    return "\n".join([*lines, "", _spread(results, repeats)]).rstrip()


def _spread(results: Results, repeats: Results) -> str:
    """What the differences come to: how far two runs of a cell lie apart."""
    differences = [
        found
        for arm, cells in repeats.items()
        for seed, again in cells.items()
        if (first := results.get(arm, {}).get(seed)) and (found := _difference(first, again)) is not None
    ]
    if len(differences) < 2:
        return ""
    low, high = interval(differences)
    return (
        f"Over these {len(differences)} cells the other run differs by {statistics.fmean(differences):+.3f} "
        f"in the mean (95 % BCa {low:+.3f} to {high:+.3f}; standard deviation "
        f"{statistics.stdev(differences):.3f})."
    )


def _difference(first: Result, again: Result) -> float | None:
    mine, other = (getattr(cell.outcomes(), PRIMARY) for cell in (first, again))
    return None if mine is None or other is None else other - mine


def _repeat(arm: str, seed: int, first: Result | None, again: Result) -> list[str]:
    second = getattr(again.outcomes(), PRIMARY)
    if first is None:
        return [f"`{arm}` {seed}", "-", "-", "-", "-", _number(second), "-", kind(again)]
    mine = getattr(first.outcomes(), PRIMARY)
    starts = [cell.header["warm_start"] for cell in (first, again)]
    start = "-" if not all(starts) else "no" if _several(starts) else "yes"
    same = first.header["fingerprint"] == again.header["fingerprint"]
    apart = next(
        (str(a["step"]) for a, b in zip(first.rows, again.rows, strict=False) if _reward(a) != _reward(b)),
        "none",
    )
    apart_by = _difference(first, again)
    difference = "-" if apart_by is None else f"{apart_by:+.3f}"
    said = [start, "yes" if same else "no", apart, _number(mine), _number(second), difference]
    return [f"`{arm}` {seed}", *said, kind(again)]


def _reward(row: dict[str, object]) -> object:
    return row.get("reward/mean")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _several(values: Iterable[Hashable]) -> bool:
    return len(set(values)) > 1


def seeds_in_words(odd: list[int]) -> str:
    return f"seed{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
