"""What `monitor replay` found, in words: no line of a list is longer than a help page's. In a pipe or a file
an alarm and its advice are a line each, whatever their length."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from services.common.counting import counted
from services.common.printing.commands import typed
from services.likelihood.exports.run_files import RunFiles
from services.likelihood.monitor.detectors.table import READS

WIDTH = 80
_READ: Mapping[str, tuple[str, ...]] = {str(rule): names for rule, names in READS.items()}
_NAMES = max(map(len, _READ)) + 2


def in_words(run: RunFiles, replayed: Mapping[str, Any]) -> Iterator[str]:
    """Phases and alarms, then what the run was judged by and what it could not be judged by. replayed: the
    object that `--json` prints."""
    yield f"{run.name}: {counted(len(run.metrics), 'step')}, {_first_and_last(run)}"
    for band in replayed["phases"]:
        yield f"  {band['phase']:<12} steps {band['first']} to {band['last']}"
    for alarm in replayed["alarms"]:
        end = "stands" if alarm["cleared"] is None else f"ended at step {alarm['cleared']}"
        about = f"{alarm['metric']}, confidence {alarm['confidence']}, {end}"
        yield from _sentence(
            f"alarm at step {alarm['step']} ({about}): {alarm['rule']}: {alarm['seen']}", 2, 6
        )
        yield from _sentence(alarm["advice"], 4, 4)
    if not replayed["alarms"]:
        yield "  no alarm"
    yield from _judged(replayed)


def _first_and_last(run: RunFiles) -> str:
    return f"{run.metrics[0]['step']} to {run.metrics[-1]['step']}"


def _judged(replayed: Mapping[str, Any]) -> Iterator[str]:
    """Each detector once, beside the metrics of the run that it reads: those that judged, then those that
    could not, below what they lacked."""
    if replayed["map"]:
        yield f"  names of {replayed['map']}"
    undecided, doubts, there = replayed["undecided"], replayed["doubts"], replayed["judged_by"]
    sound = [name for name in there if name not in doubts]
    judged = {rule: [name for name in reads if name in sound] for rule, reads in _READ.items()}
    judged = {rule: names for rule, names in judged.items() if names and rule not in undecided}
    yield f"  judged by {len(judged)} of {len(_READ)} detectors{':' if judged else ''}"
    for rule, names in judged.items():
        yield from _row(rule, names, 4)
    if undecided:
        verb = "did not have what they need" if replayed["over"] else "cannot judge yet"
        yield f"  {len(undecided)} {verb}:"
    for why, rules in _by_reason(undecided):
        if len(rules) == 1:
            weak = ", ".join(n for n in _READ[rules[0]] if n in doubts and _is_told(n, doubts[n], undecided))
            yield from _row(rules[0], [f"{why} ({weak})" if weak else why], 4)
            continue
        yield from _wrapped(f"{why}:", 4)
        for rule in rules:
            yield from _row(rule, [name for name in _READ[rule] if name in there], 6)
    yield from _listed("no numbers", replayed["no_numbers"])
    yield from _listed("in doubt", {n: why for n, why in doubts.items() if not _is_told(n, why, undecided)})
    if replayed["missing"]:
        yield "  metrics that are missing:"
        yield from _wrapped(", ".join(replayed["missing"]), 4)


def _is_told(metric: str, why: str, undecided: Mapping[str, str]) -> bool:
    """Whether the metric stands beside a detector already, below the same reason."""
    return any(metric in _READ[rule] and why in reason for rule, reason in undecided.items() if rule in _READ)


def _by_reason(reasons: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Each reason with the names that have it."""
    for why in dict.fromkeys(reasons.values()):
        yield why, [name for name, said in reasons.items() if said == why]


def _listed(what: str, reasons: Mapping[str, str]) -> Iterator[str]:
    for why, names in _by_reason(reasons):
        yield from _wrapped(f"{what} ({why}):", 2, 4)
        yield from _wrapped(", ".join(names), 4)


def _row(rule: str, metrics: Iterable[str], indent: int) -> Iterator[str]:
    yield from _wrapped(f"{rule:<{_NAMES}}{', '.join(metrics)}".rstrip(), indent, indent + _NAMES)


def _sentence(text: str, indent: int, later: int) -> list[str]:
    return _wrapped(text, indent, later) if sys.stdout.isatty() else [f"{' ' * indent}{typed(text)}"]


def _wrapped(text: str, indent: int, later: int | None = None) -> list[str]:
    """Lines of the text, commands as they are typed here. A name or a path stays whole. later: the indent of
    all but the first."""
    return textwrap.wrap(
        typed(text),
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent if later is None else later),
        break_long_words=False,
        break_on_hyphens=False,
    )
