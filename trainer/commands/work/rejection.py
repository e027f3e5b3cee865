"""Rejection sampling: right trajectories of a run, as demonstrations (arXiv 2503.09516, section 4.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from services.common.counting import counted
from services.common.errors import UserError
from services.contracts import Action, ActionKind, Observation, Question, Trajectory
from services.rollout.worker.loop import prompt_of
from services.rollout.worker.plain_text import Outside, TextEncoder
from services.rollout.worker.templates import Template, reading_of
from services.settings import RolloutSettings
from trainer.commands.look.stored import STEP, Run, Segment, StoredTrajectory

KINDS: dict[str, ActionKind] = {"search": "search", "answer": "answer"}


def right_trajectories(
    given: str,
    questions: list[Question],
    template: Template,
    encoder: TextEncoder,
    settings: RolloutSettings,
    say: Callable[[str], None],
) -> list[Trajectory]:
    """The right trajectories that a run sampled in training, the same words for a question once. given: as
    `unspiral report` takes a run; questions: the training set, which has the prompts.

    Those with an action that neither searches nor answers are left out, and those of questions that are not
    in the training set. Raises UserError where none is left.
    """
    run = Run(given)
    asked = {(one.text, one.golden_answers): one for one in questions}
    seen: set[tuple[str, str]] = set()
    left_out: Counter[str] = Counter()
    found: list[Trajectory] = []
    sampled = 0
    for source in run.sources():
        if not source.startswith(STEP):
            continue
        for stored in run.read(source):
            sampled += 1
            question = asked.get((stored.question, tuple(stored.golden_answers)))
            words = (stored.question, "".join(segment.text for segment in stored.segments))
            if not run.is_right(stored):
                left_out["not right"] += 1
            elif question is None:
                left_out["of questions that are not in data.train"] += 1
            elif words in seen:
                left_out["the same words again"] += 1
            elif (one := recorded(stored, question, template, encoder, settings)) is None:
                left_out["with an invalid action, or too long"] += 1
            else:
                found.append(one)
            seen.add(words)
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in left_out.items())
    of = counted(sampled, "trajectory is", "trajectories are")
    say(f"{run.folder}: {len(found):,} of {of} right ({reasons or 'all'})")
    if not found:
        raise UserError(f"--trajectories {given}: no right trajectory of data.train is there")
    return found


def recorded(
    stored: StoredTrajectory,
    question: Question,
    template: Template,
    encoder: TextEncoder,
    settings: RolloutSettings,
) -> Trajectory | None:
    """A trajectory that was kept in words, as tokens again; None where an action is invalid or there is no
    room. Its text is encoded piece by piece, and may be other tokens than those that were sampled."""
    segments: list[Action | Observation] = []
    for at, segment in enumerate(stored.segments):
        if segment.by != "model":
            ids = encoder.encode(*_pieces(segment.text, template))
            segments.append(Observation(ids, segment.text))
            continue
        if segment.kind not in KINDS:
            return None
        ids = encoder.encode(segment.text, _end_of_turn(stored.segments[at + 1 : at + 2], template))
        action = Action(ids, [0.0] * len(ids), 0, KINDS[segment.kind], segment.text)
        if action.kind == "search":
            action.document_ids = segment.documents
        segments.append(action)
    prompt = prompt_of(question, template, settings)
    whole = Trajectory(
        stored.uid,
        question.id,
        question,
        prompt,
        segments,
        "answer",
        reading=reading_of(template),
    )
    used = len(prompt) + sum(len(segment.token_ids) for segment in segments)
    ends_well = bool(segments) and isinstance(segments[-1], Action) and segments[-1].kind == "answer"
    return whole if ends_well and used <= settings.max_model_tokens else None


def _pieces(text: str, template: Template) -> list[str]:
    """An observation: our own markup around text from outside."""
    head: str = getattr(template, "head", "")
    tail: str = getattr(template, "tail", "")
    head = next((h for h in (head, head.removeprefix(_turn_end(template))) if text.startswith(h)), "")
    tail = tail if text.endswith(tail) else ""
    return [head, Outside(text[len(head) : len(text) - len(tail)]), tail]


def _end_of_turn(following: list[Segment], template: Template) -> str:
    """The end of the turn, where the model wrote it itself: the observation then lacks it."""
    end = _turn_end(template)
    return "" if not following or following[0].text.startswith(end) else end


def _turn_end(template: Template) -> str:
    end: str = getattr(template, "turn_end", "")
    return end
