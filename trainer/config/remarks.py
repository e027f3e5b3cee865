"""Remarks on a configuration that is accepted."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from trainer.config.presets import PRESETS
from trainer.config.schema import Config
from trainer.config.used_with import UsedWith


def remarks(config: Config) -> list[str]:
    """One line for each setting that contradicts the name of the loss, and for each that does nothing beside
    the others."""
    a = config.algorithm
    lines = []
    for key, value in PRESETS.get(a.loss, {}).items():
        mine = getattr(a, key)
        if mine == value or (key == "dynamic_sampling" and mine):
            continue
        why = ""
        if key == "dynamic_sampling" and config.rollout.max_staleness:
            why = f" (rollout.max_staleness={config.rollout.max_staleness} excludes it)"
        lines.append(f"algorithm.loss={a.loss} runs with algorithm.{key}={mine}{why}; its own is {value}")
    if a.loss == "dapo" and not a.overlong.tokens:
        lines.append("algorithm.loss=dapo runs without its length penalty; algorithm.overlong.tokens sets it")
    return [
        *lines,
        *_alone(config),
        *_right_and_called_wrong(config),
        *_garbage_preserved(config),
        *_without_effect(config),
    ]


FEW_SAMPLES = 4
"""Groups smaller than this are often all wrong, also where the policy is often right."""


def _alone(config: Config) -> Iterator[str]:
    """A line where answers are compared with nothing."""
    if config.rollout.group_size == 1:
        yield (
            "rollout.group_size=1: an answer has no other to be compared with, so its advantage is its "
            "reward, and a wrong answer with reward 0 teaches nothing; set 2 or more, 5 by default"
        )


def _right_and_called_wrong(config: Config) -> Iterator[str]:
    """A line where the reward gives an exact answer less than what counts as right."""
    if config.reward.kind == "format" and config.reward.right_at is None:
        yield (
            "reward.kind=format gives a right answer in a wrong form 0.8, and what counts as right is a "
            "reward of 1 at least: LLDS, logp/right and `right` of an evaluation call such an answer wrong; "
            "reward.right_at=0.8 calls it right"
        )


def _garbage_preserved(config: Config) -> Iterator[str]:
    """A line where LLDS would hold many answers that nobody has called right: the advantages of a group that
    is all wrong are 0, and 0 is not negative."""
    size = config.rollout.group_size
    llds = config.algorithm.llds
    if llds.lambda_ and llds.preserve == "nonnegative" and size < FEW_SAMPLES:
        yield (
            f"rollout.group_size={size} with algorithm.llds.preserve=nonnegative: many groups will be "
            "all wrong, and LLDS preserves their answers too (llds/preserved_unrewarded shows how many); set "
            f"algorithm.llds.preserve=right, or groups of {FEW_SAMPLES} or more"
        )


def _without_effect(section: BaseModel, path: str = "") -> Iterator[str]:
    """One line for each key that is set, and that no other key makes use of (`UsedWith`)."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        key = f"{path}{field.alias or name}"
        if isinstance(value, BaseModel):
            yield from _without_effect(value, f"{key}.")
        for needs in field.metadata:
            if isinstance(needs, UsedWith) and value != field.default and not needs.is_used(section):
                yield f"{key}={value} does nothing: it needs {path}{needs}"
