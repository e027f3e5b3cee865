"""The groups of a step as the page shows them: filtered, in order, with the place that weighs most."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from pydantic import BaseModel, ConfigDict

from services.likelihood.microscope.heads import Place, SampleHead
from services.likelihood.microscope.record import SampledTrajectory, Written
from services.likelihood.microscope.weights import HeadColumns, heaviest, place_of, weights_of
from services.likelihood.store.base import LikelihoodStore

Which = Literal["right", "wrong", "invalid", "truncated"]
Order = Literal["mixed", "falls", "longest", "alarm"]
MOST_GROUPS = 1000


class Answer(BaseModel):
    """Part of an answer of the service."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class GroupMeans(Answer):
    """What the grid says of a group. Filters do not change it."""

    trajectories: int
    """That are kept of the group."""
    reward: float | None
    """Mean over those with a reward."""
    falling: float | None
    """Share of those scored again that lost likelihood."""
    change: float | None
    """Mean over those scored again, in nats per token."""
    searches: float


class StepGroup(Answer):
    """The sampled trajectories of one prompt occurrence."""

    group: str
    question: str | None
    data_source: str | None
    trajectories: list[SampleHead]
    """By uid; those that the filters leave."""
    whole: GroupMeans
    """Of all its trajectories, also of those that the filters leave out."""


class Heaviest(Answer):
    """The trajectory that weighs most in an alarm, and its token."""

    group: str
    uid: str
    place: Place | None
    """Null where no token can be named."""


class StepSamples(Answer):
    """What is kept of a step token by token, without the texts."""

    run: str
    step: int
    rule: str | None
    trajectories: int
    """That are kept of the step."""
    kept_groups: int
    """Groups of these."""
    step_trajectories: int | None
    """That the step had; null where the step's records are not in the store."""
    step_groups: int | None
    """Groups that the step had."""
    matching: int
    """That the filters leave."""
    groups: list[StepGroup]
    more_groups: int
    """That were left out because of `limit`."""
    sources: list[str]
    """Data sources of the step."""
    heaviest: Heaviest | None
    untouched: str | None
    """Why LLDS pulls no token of the step up, as its metrics say; null where it may, or nothing is known."""
    first: int | None
    """First step of which trajectories are kept."""
    previous: int | None
    """Nearest such step before this one."""
    next: int | None
    last: int | None


class Filters(BaseModel):
    """Which trajectories, and in which order their groups come."""

    which: Which | None = None
    source: str | None = None
    text: str | None = None
    """In question, answer, tokens, observations or documents; case does not matter."""
    order: Order = "mixed"
    rule: str | None = None
    """The rule of an alarm, for the order `alarm` and for what weighs most."""
    limit: int = 100


def _untouched(store: LikelihoodStore, run: str, step: int) -> str | None:
    metrics = {name: value for line in store.steps(run, step, step) for name, value in line.metrics.items()}
    if metrics.get("llds/lambda") == 0:
        return "it is off (lambda 0)"
    if metrics.get("learner/optimiser_steps") != 0:
        return None
    if metrics.get("learner/skipped"):
        return "nothing was updated at this step: its gradient was not finite"
    all_equal = metrics.get("groups/zero_variance") == 1
    return f"nothing was updated at this step{': all advantages are 0' if all_equal else ''}"


def step_samples(store: LikelihoodStore, run: str, step: int, filters: Filters) -> StepSamples:
    """The groups of a step. Raises NotStored for a run that is not in the store."""
    steps = list(store.sampled_steps(run))
    heads = [head for head in store.sample_heads(run, step) if not head.probe]
    holding = None
    if filters.text:
        holding = {t.uid for t in store.samples(run, step) if holds(t, filters.text.casefold())}
    left = [
        head
        for head in heads
        if (holding is None or head.uid in holding)
        and filters.source in (None, head.data_source)
        and (filters.which is None or is_such(head, filters.which))
    ]
    groups = _in_order(_grouped(left, heads), filters)
    count, groups_of_step = store.trajectory_counts(run, step)
    return StepSamples(
        run=run,
        step=step,
        rule=filters.rule,
        trajectories=len(heads),
        kept_groups=len({head.group for head in heads}),
        step_trajectories=count or None,
        step_groups=groups_of_step or None,
        matching=len(left),
        groups=groups[: filters.limit],
        more_groups=max(0, len(groups) - filters.limit),
        sources=sorted({head.data_source for head in heads if head.data_source is not None}),
        heaviest=heaviest_of(left, filters.rule),
        untouched=_untouched(store, run, step),
        first=min(steps, default=None),
        previous=max((s for s in steps if s < step), default=None),
        next=min((s for s in steps if s > step), default=None),
        last=max(steps, default=None),
    )


def heaviest_of(heads: Sequence[SampleHead], rule: str | None) -> Heaviest | None:
    """What weighs most of some trajectories; None of none."""
    most = heaviest(heads, rule)
    if most is None:
        return None
    return Heaviest(group=most.group, uid=most.uid, place=place_of(most, rule))


def is_such(head: SampleHead, which: Which) -> bool:
    """Whether a trajectory is of a kind."""
    if which in ("right", "wrong"):
        return head.right is (which == "right")
    return head.valid is False if which == "invalid" else head.finish == "length"


def holds(trajectory: SampledTrajectory, wanted: str) -> bool:
    """Whether a text (in folded case) stands in a trajectory."""
    texts = [trajectory.question or "", trajectory.uid, trajectory.group]
    for segment in trajectory.segments:
        if isinstance(segment, Written):
            texts.append("".join(segment.tokens))
            texts += [f"{d.id} {d.title or ''} {d.text or ''}" for d in segment.documents or ()]
        else:
            texts.append(segment.text)
    return any(wanted in text.casefold() for text in texts)


def _grouped(left: Sequence[SampleHead], heads: Sequence[SampleHead]) -> list[StepGroup]:
    whole: dict[str, list[SampleHead]] = {}
    for head in heads:
        whole.setdefault(head.group, []).append(head)
    groups: dict[str, StepGroup] = {}
    for head in left:
        if head.group not in groups:
            groups[head.group] = StepGroup(
                group=head.group,
                question=head.question,
                data_source=head.data_source,
                trajectories=[],
                whole=_means(whole[head.group]),
            )
        groups[head.group].trajectories.append(head)
    return list(groups.values())


def _means(heads: Sequence[SampleHead]) -> GroupMeans:
    rewards = [head.reward for head in heads if head.reward is not None]
    changes = [head.change for head in heads if head.change is not None]
    return GroupMeans(
        trajectories=len(heads),
        reward=fmean(rewards) if rewards else None,
        falling=fmean(change < 0 for change in changes) if changes else None,
        change=fmean(changes) if changes else None,
        searches=fmean(head.searches for head in heads),
    )


def _in_order(groups: list[StepGroup], filters: Filters) -> list[StepGroup]:
    def heaviness(group: StepGroup) -> tuple[bool, float]:
        heads = group.trajectories
        if filters.order == "longest":
            return False, float(max(head.tokens for head in heads))
        rule = filters.rule if filters.order == "alarm" else None
        mixed = filters.order == "mixed" and {True, False} <= {head.right for head in heads}
        return mixed, float(weights_of(HeadColumns(heads), rule).max())

    return sorted(groups, key=heaviness, reverse=True)
