"""`unspiral trajectories show|find|diff`: what a run has sampled, on the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from services.common.errors import UserError
from services.likelihood.microscope.record import SampledTrajectory
from trainer.commands.look.printing import head_line, show, word_diff
from trainer.commands.look.stored import STEP, Run, StoredTrajectory, change_of
from trainer.commands.terminal import harmless, in_one_line


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
    tokens = run.tokens(source, group)
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
    out = console()
    found = [t for source in sources for t in run.read(source) if wanted.takes(run, t)]
    tokens: dict[tuple[str, str], SampledTrajectory] = {}
    if falls:
        tokens = dict(_sampled(run, found))
        found = [t for t in found if _fall(tokens, t) is not None]
        found.sort(key=lambda t: _fall(tokens, t) or 0.0)
        if not found:
            raise UserError(
                f"{run.folder}: its store holds no such trajectory token by token "
                "(store.trajectory_groups sets how many it keeps)"
            )
    elif longest:
        found.sort(key=lambda t: -len(t.model_text))
    for t in found[:limit]:
        if as_json:
            print(t.line)
            continue
        line = head_line(run, t, tokens.get((t.source, t.uid)))
        if not t.source.startswith(STEP):
            line = Text.assemble((f"{t.source}: ", "dim"), line)
        out.print(line, soft_wrap=True)
    if not as_json:
        _say_more(out, len(found), limit)


def _sampled(run: Run, found: list[StoredTrajectory]) -> Iterator[tuple[tuple[str, str], SampledTrajectory]]:
    for source in dict.fromkeys(t.source for t in found):
        yield from (((source, uid), t) for uid, t in run.tokens(source).items())


def _fall(tokens: dict[tuple[str, str], SampledTrajectory], t: StoredTrajectory) -> float | None:
    sampled = tokens.get((t.source, t.uid))
    return None if sampled is None else change_of(sampled)


def run_diff(given: str, before: str, after: str, *, question: str | None, limit: int) -> None:
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
    out = console()
    for q in common[:limit]:
        out.print(Text(harmless(f"question: {q}"), "bold"), soft_wrap=True)
        for name, side in zip(names, sides, strict=True):
            answers = ", ".join(in_one_line(t.answer, 30) or "no answer" for t in side[q])
            right = sum(run.is_right(t) for t in side[q])
            out.print(Text(f"  {name}: {right} of {len(side[q])} right: {answers}"), soft_wrap=True)
        a, b = sides[0][q][0], sides[1][q][0]
        out.print(word_diff(_whole(a), _whole(b)), soft_wrap=True)
        out.print()
    _say_more(out, len(common), limit)


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
