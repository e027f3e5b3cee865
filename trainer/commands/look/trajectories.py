"""`unspiral trajectories show|find|diff`: what a run has sampled, on the terminal."""

from __future__ import annotations

import heapq
import itertools
import json
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from services.common.counting import counted
from services.common.errors import UnspiralError, UserError
from services.common.printing.console import Console
from services.common.printing.harmless import harmless, in_one_line
from services.likelihood.microscope.record import SampledTrajectory
from trainer.commands.look.printing import head_line, show, word_diff
from trainer.commands.look.stored import Run, StoredTrajectory, change_of, is_step


def console() -> Console:
    """For text of models. In a pipe it has no colours, and lines stay whole."""
    return Console(highlight=False, markup=False, emoji=False)


def run_show(
    given: str, step: str | None, *, group: str | None, uid: str | None, limit: int, as_json: bool
) -> None:
    """Print trajectories of a step, or of an evaluation."""
    run = Run(given)
    source = run.source(step)
    chosen = [
        t for t in run.read(source) if (group is None or t.group == group) and (uid is None or t.uid == uid)
    ]
    if not chosen:
        what = f"group {group}" if group else f"trajectory {uid}" if uid else "trajectory"
        raise UserError(f"{run.folder}, {source}: no {what} there")
    out = console()
    if as_json:
        for t in chosen[:limit]:
            print(t.line)
        return
    try:
        tokens = run.tokens(source, group)
    except UnspiralError as error:  # the words are there all the same
        print(f"note: {error}; tokens and what the update did to them are left out", file=sys.stderr)
        tokens = {}
    for t in chosen[:limit]:
        show(out, run, t, tokens.get(t.uid))
    _say_more(out, len(chosen), limit)


@dataclass(frozen=True)
class Wanted:
    """What is looked for; what is None or false is not asked."""

    text: str | None = None
    right: bool | None = None
    invalid: bool = False
    truncated: bool = False
    data_source: str | None = None

    def takes(self, run: Run, t: StoredTrajectory) -> bool:
        return (
            (self.right is None or run.is_right(t) is self.right)
            and (not self.invalid or t.invalid)
            and (not self.truncated or t.truncated)
            and (self.data_source is None or t.data_source == self.data_source)
            and (self.text is None or _holds(t, self.text))
        )


def _holds(t: StoredTrajectory, text: str) -> bool:
    """Whether question, golden answers or a segment hold the text, in capitals or not."""
    wanted = text.casefold()
    places = (t.question, *t.golden_answers, *(s.text for s in t.segments))
    return any(wanted in place.casefold() for place in places)


def run_find(
    given: str, wanted: Wanted, *, step: str | None, falls: bool, longest: bool, limit: int, as_json: bool
) -> None:
    """Print a line for each trajectory that is wanted, those that fell most or are longest first if
    asked."""
    run = Run(given)
    sources = [run.source(step)] if step is not None else run.sources()
    matches = _Matches(run, sources, wanted, with_change=falls)
    # A long run has gigabytes of them: no more than `limit` are kept.
    chosen: Iterable[Match] = matches
    if falls:
        chosen = heapq.nsmallest(limit, matches, key=lambda m: m.change)
    elif longest:
        chosen = heapq.nlargest(limit, matches, key=lambda m: len(m.trajectory.model_text))
    out = console()
    for m in itertools.islice(chosen, limit):
        if as_json:
            print(m.trajectory.line)
            continue
        line = head_line(run, m.trajectory, m.tokens)
        if not is_step(m.trajectory.source):
            line = Text.assemble((f"{m.trajectory.source}: ", "dim"), line)
        out.print(line, soft_wrap=True)
    if falls and not matches.count:
        raise UserError(
            f"{run.folder}: its store holds no such trajectory token by token "
            "(store.trajectory_groups sets how many it keeps)"
        )
    if not as_json and not falls and not longest:
        deque(chosen, maxlen=0)  # counts the rest
    if not as_json:
        _say_more(out, matches.count, limit)
    if not as_json and not matches.count:
        print(f"{run.folder}: no trajectory fits", file=sys.stderr)


@dataclass(frozen=True)
class Match:
    """A trajectory that is wanted."""

    trajectory: StoredTrajectory
    tokens: SampledTrajectory | None = None
    change: float = 0.0
    """Of its log-prob by the update, in nats per token, where that is asked for."""


class _Matches(Iterator[Match]):
    """The trajectories that are wanted, one after another, and how many there were. with_change: those alone
    that the store holds token by token, scored again."""

    def __init__(self, run: Run, sources: list[str], wanted: Wanted, *, with_change: bool) -> None:
        self.count = 0
        self._found = self._find(run, sources, wanted, with_change)

    def __next__(self) -> Match:
        found = next(self._found)
        self.count += 1
        return found

    def _find(self, run: Run, sources: list[str], wanted: Wanted, with_change: bool) -> Iterator[Match]:
        for source in sources:
            tokens = run.tokens(source) if with_change else {}
            if with_change and not tokens:
                continue
            for t in run.read(source):
                if not wanted.takes(run, t):
                    continue
                sampled = tokens.get(t.uid)
                change = change_of(sampled) if sampled is not None else None
                if change is not None:
                    yield Match(t, sampled, change)
                elif not with_change:
                    yield Match(t)


def run_diff(given: str, before: str, after: str, *, question: str | None, limit: int, as_json: bool) -> None:
    """Print how the answers to the same prompts differ between two steps, or evaluations: the prompts whose
    mean reward changed most, or one of them."""
    run = Run(given)
    names = (run.source(before), run.source(after))
    sides = [_by_question(run, name) for name in names]
    common = [
        q for q in sides[0] if q in sides[1] and (question is None or question.casefold() in q.casefold())
    ]
    if not common:
        which = f" that holds {question!r}" if question else ""
        raise UserError(f"{run.folder}: {names[0]} and {names[1]} have no prompt{which} in common")

    def changed(q: str) -> float:
        return _mean(sides[1][q]) - _mean(sides[0][q])

    common.sort(key=lambda q: -abs(changed(q)))
    if as_json:
        for q in common[:limit]:
            print(json.dumps(_both_sides(run, q, names, (sides[0][q], sides[1][q])), ensure_ascii=False))
        return
    out = console()
    changes = [changed(q) for q in common]
    higher, lower = sum(c > 0 for c in changes), sum(c < 0 for c in changes)
    same = f"the same in {len(common) - higher - lower:,}"
    prompts = counted(len(common), "prompt")
    out.print(f"{prompts} of both: mean reward higher in {higher:,}, lower in {lower:,}, {same}\n")
    for q in common[:limit]:
        out.print(Text(harmless(f"question: {q}"), "bold"), soft_wrap=True)
        for name, side in zip(names, sides, strict=True):
            answers = ", ".join(in_one_line(t.answer, 30) or "no answer" for t in side[q])
            right = sum(run.is_right(t) for t in side[q])
            counts = f"{right} of {len(side[q])} right {run.judge(name)}"
            out.print(Text(f"  {name}: {counts}: {answers}"), soft_wrap=True)
        a, b = sides[0][q][0], sides[1][q][0]
        out.print(word_diff(_whole(a), _whole(b)), soft_wrap=True)
        out.print()
    _say_more(out, len(common), limit)


def _both_sides(
    run: Run, question: str, names: tuple[str, str], sides: tuple[list[StoredTrajectory], ...]
) -> dict[str, Any]:
    """A prompt of `trajectories diff --json`, its trajectories as they are stored."""
    told: dict[str, Any] = {"question": question, "change": _mean(sides[1]) - _mean(sides[0])}
    for side, name, found in zip(("before", "after"), names, sides, strict=True):
        lines = [json.loads(t.line) for t in found]
        told[side] = {"source": name, "right": sum(map(run.is_right, found)), "trajectories": lines}
    return told


def _by_question(run: Run, source: str) -> dict[str, list[StoredTrajectory]]:
    found = defaultdict(list)
    for t in run.read(source):
        found[t.question].append(t)
    return dict(found)


def _mean(trajectories: list[StoredTrajectory]) -> float:
    known = [t.reward for t in trajectories if t.reward is not None]
    return sum(known) / len(known) if known else 0.0


def _whole(t: StoredTrajectory) -> str:
    """Model's text and observations, each on a line."""
    return "\n".join(s.text.strip() for s in t.segments)


def _say_more(out: Console, found: int, limit: int) -> None:
    if found > limit:
        out.print(Text(f"{found - limit} more; --limit shows them", "dim"))
