"""Whether cells of this machine can stand beside the committed ones: the warm starts of their seeds, which a
machine that rounds otherwise makes with other weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.collapse.judged.collected import Results
from benchmarks.collapse.judged.sameness import seeds_in_words
from benchmarks.collapse.running.grid import GridProgress, Runner, warm_file, warm_job
from benchmarks.grids.kept import processor


def make_starts(folder: Path, seeds: Sequence[int], parallel: int, console: Console) -> dict[int, str]:
    """Train the warm starts that are not in the cache. Returns their checksums by seed.

    Raises UserError where earlier cells of this folder began with other weights, UnspiralError where a warm
    start failed, Stopped."""
    jobs = [job for seed in seeds if (job := warm_job(folder, seed)) is not None]
    progress = GridProgress([], parallel, console)
    with Runner(parallel, console).opened() as runner:
        runner.run(jobs, progress)
    return {seed: json.loads(warm_file(folder, seed).read_text(encoding="utf-8"))["sha256"] for seed in seeds}


def comparison(made: dict[int, str], results: Results, folder: Path) -> tuple[list[str], bool]:
    """Lines, and whether all that can be compared is equal. made: checksums by seed. folder: that of the
    results."""
    known: dict[int, set[str]] = {}
    for cells in results.values():
        for seed, cell in cells.items():
            known.setdefault(seed, set()).update({cell.header["warm_start"]} - {""})
    without = [seed for seed in made if not known.get(seed)]
    same = [seed for seed, start in made.items() if known.get(seed) == {start}]
    other = [seed for seed in made if seed not in without + same]
    said = (
        (same, f"the warm starts of {folder}; cells of this machine can stand beside those there"),
        (without, f"no warm start is known in {folder}"),
        (
            other,
            f"other warm starts than in {folder}: nothing is concluded from cells of both (PLAN.md); run "
            "each arm here together with its control, and collect them into another folder (--out)",
        ),
    )
    lines = [f"{seeds_in_words(seeds)}: {words}" for seeds, words in said if seeds]
    return [f"processor: {processor()}", *lines], not other
