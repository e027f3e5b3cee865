"""The page of CollapseBench, from collected results alone: levels, effects with intervals, a heat map, the
barometer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.barometer.judged import fell, wilson
from benchmarks.collapse_bench import roc
from benchmarks.collapse_bench.causes import BENCH, CAUSES
from benchmarks.collapse_bench.collected import Result
from benchmarks.collapse_bench.dose import dose_section
from benchmarks.collapse_bench.effects import (
    PLAIN,
    Scores,
    effect,
    effects_table,
    names,
    scores_of,
)
from benchmarks.collapse_bench.plan import CURES
from benchmarks.grids.command_line import write_between
from services.common.files import write_atomically
from services.likelihood.monitor.phases import PhaseMonitor

FIRST, LAST = "<!-- collapse bench: begin -->", "<!-- collapse bench: end -->"
LLDS = ("llds_a", "llds_r")


def where_llds_loses(scores: Scores) -> str:
    """By rule: the causes under which LLDS harms, and those under which another cure has the better mean."""
    lines = []
    for cure in LLDS:
        found = {cause: effect(scores, (cause, cure), (cause, PLAIN)) for cause in BENCH}
        known = {cause: e for cause, e in found.items() if e.pairs}
        ill = [cause for cause in known if cause not in roc.SOUND]
        if not ill:
            lines.append(f"- `{cure}`: not run yet.")
            continue
        others = [other for other in CURES if other not in (PLAIN, *LLDS)]
        beaten = [
            cause
            for cause, e in known.items()
            if any(
                other.mean > e.mean and round(other.mean, 2)  # a cure that changed nothing is none
                for other in (effect(scores, (cause, o), (cause, PLAIN)) for o in others)
            )
        ]
        by_word = {word: [c for c in ill if known[c].word == word] for word in ("helps", "harms", "")}
        sound = "; ".join(
            f"in sound runs (`{c}`) " + (f"it {e.word}" if e.word else "no effect was shown")
            for c, e in known.items()
            if c not in ill
        )
        lines.append(
            f"- `{cure}`: of {len(ill)} causes it helps under {names(by_word['helps'])} and harms under "
            f"{names(by_word['harms'])}; under the other {len(by_word[''])} nothing was shown"
            f"{f'; {sound}' if sound else ''}. "
            f"Its mean is below plain GRPO's under "
            f"{names([c for c, e in known.items() if e.mean < 0])}. Another cure "
            f"that is not LLDS has the better mean under {names(beaten)}."
        )
    return "\n".join(lines)


def barometer_lines(results: Sequence[Result]) -> str:
    """How the monitor, with its defaults, tells runs whose reward fell from the others."""
    due: list[bool] = []
    other: list[bool] = []
    leads: list[int] = []
    for result in results:
        begins = CAUSES[result.key[0]].begins
        monitor = PhaseMonitor()
        alarms = [a.step for row in result.rows for a in monitor.update(row).alarms if a.step >= begins]
        at = fell([row.get("reward/mean") for row in result.rows], begins)
        (other if at is None else due).append(bool(alarms))
        if at is not None and alarms:
            leads.append(at - min(alarms))
    median = f", median lead {statistics.median(leads):g} steps" if leads else ""
    return (
        f"An alarm came in {_share(due)} of the runs whose reward fell{median}, and in "
        f"{_share(other)} of the others (which have something wrong with them too, but for `none`)."
    )


def _share(hits: Sequence[bool]) -> str:
    low, high = wilson(sum(hits), len(hits))
    return f"{sum(hits)} of {len(hits)} ({low:.2f} to {high:.2f})" if hits else "0 of 0"


def judged(results: Sequence[Result]) -> list[roc.Run]:
    """The runs of the bench as the monitor judges them: the doses are one cause, four times over."""
    return roc.judged([result for result in results if result.key[0] in BENCH])


def block(results: Sequence[Result], runs: Sequence[roc.Run] | None = None) -> str:
    """The generated part of the page. runs: the results as the monitor judges them, where that was done."""
    if not results:
        return "No cell has been collected yet."
    bench = [result for result in results if result.key[0] in BENCH]
    scores = scores_of(bench)
    seeds = sorted({seed for *_, seed in scores})
    cells = {(cause, cure) for cause, cure, _ in scores}
    cpu = [s for r in bench if (s := r.header["cpu_seconds"]) is not None]
    missing = [f"`{a}+{b}`" for a in BENCH for b in CURES if (a, b) not in cells]
    cost = f", median {statistics.median(cpu):.0f} s of CPU each" if cpu else ""
    parts = [
        f"{len(bench)} runs, seeds {', '.join(map(str, seeds))}{cost}. "
        + (f"Missing: {', '.join(missing)}." if missing else "No cell of the bench is missing."),
        "![Heat map of effects by cause and cure](images/collapse_bench.svg)",
        "Each cell: exact match under the cure minus plain GRPO's under the same cause; mean, Student's "
        "95 % interval of paired seeds. Bold where the interval does not hold 0.",
        effects_table(scores),
        "### Where LLDS helps and where it loses",
        where_llds_loses(scores),
        "### Dose and response of mismatch",
        dose_section(results),
        "### The barometer on these runs",
        barometer_lines(bench),
        roc.section(judged(results) if runs is None else runs),
    ]
    return "\n\n".join(parts)


def heat_map(results: Sequence[Result]) -> str:
    """An SVG: a row per cause, a column per cure; red harms, blue helps, by the mean effect, with its
    interval."""
    scores = scores_of(results)
    cures = [cure for cure in CURES if cure != PLAIN]
    width, height, left, top = 100, 38, 150, 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" '
        f'viewBox="0 0 {left + width * len(cures)} {top + height * len(BENCH)}">'
    ]
    for x, cure in enumerate(cures):
        parts.append(f'<text x="{left + width * (x + 0.5)}" y="24" text-anchor="middle">{cure}</text>')
    for y, cause in enumerate(BENCH):
        at = top + height * y
        parts.append(f'<text x="{left - 8}" y="{at + 22}" text-anchor="end">{cause}</text>')
        for x, cure in enumerate(cures):
            found = effect(scores, (cause, cure), (cause, PLAIN))
            place = f'x="{left + width * x}" y="{at}" width="{width - 2}" height="{height - 2}"'
            parts.append(f'<rect {place} fill="{_colour(found.mean)}"/>')
            text = f"{found.mean:+.2f}{' *' if found.word else ''}" if found.pairs else "-"
            middle = left + width * x + width / 2
            parts.append(f'<text x="{middle}" y="{at + 16}" text-anchor="middle">{text}</text>')
            if not math.isnan(found.low):
                span = f"{found.low:+.2f} to {found.high:+.2f}"
                parts.append(
                    f'<text x="{middle}" y="{at + 30}" text-anchor="middle" font-size="10">{span}</text>'
                )
    return "\n".join([*parts, "</svg>\n"])


def _colour(mean: float) -> str:
    """White at 0 to full colour at .3 of exact match."""
    if math.isnan(mean):
        return "#eeeeee"
    pale = round(255 * (1 - min(1.0, abs(mean) / 0.3) * 0.6))
    return f"#{pale:02x}{pale:02x}ff" if mean >= 0 else f"#ff{pale:02x}{pale:02x}"


def write_page(results: Sequence[Result], page: Path) -> None:
    """Write the block between the two marks of a page, and the two pictures into `images` beside it. Raises
    UserError where the page has no marks."""
    runs = judged(results)
    write_between(page, FIRST, LAST, block(results, runs))
    if results:
        (page.parent / "images").mkdir(exist_ok=True)
        write_atomically(page.parent / "images" / "collapse_bench.svg", heat_map(results))
        write_atomically(page.parent / "images" / "collapse_bench_roc.svg", roc.drawing(runs))
