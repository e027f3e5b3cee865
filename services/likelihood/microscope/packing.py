"""Sampled trajectories as the stores keep them: a small head in JSON, and a body that is deflated."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import orjson

from services.common.errors import UserError
from services.likelihood.microscope.heads import SampleHead, head_of
from services.likelihood.microscope.prompts import PromptGroup, joined, prompt_of
from services.likelihood.microscope.record import SampledTrajectory

DECIMALS = 5
"""Of a stored log-prob: a hundredth of what a float32 near -1 loses over a thousand tokens."""
LEVEL = 3
MAX_STEP_PACKED = 128 << 20
"""Most bytes of the packed trajectories of one step."""
MAX_STEP_SAMPLES = 20_000


@dataclass(frozen=True)
class PackedSample:
    """One trajectory as it is stored."""

    uid: str
    group: str
    head: bytes
    body: bytes
    prompt: str
    """services.likelihood.microscope.prompts.prompt_of"""
    probe: bool = False

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return len(self.head) + len(self.body)


def packed(trajectory: SampledTrajectory) -> PackedSample:
    """A trajectory for the store. Its log-probs are rounded in place."""
    for written in trajectory.written:
        for name in ("logp_before", "logp_after", "logp_sampler"):
            if (values := getattr(written, name)) is not None:
                setattr(written, name, [round(value, DECIMALS) for value in values])
    head = head_of(trajectory)
    body = zlib.compress(trajectory.model_dump_json(exclude_none=True).encode(), LEVEL)
    return PackedSample(
        trajectory.uid,
        trajectory.group,
        head.model_dump_json(exclude_none=True).encode(),
        body,
        prompt_of(head.question, head.group),
        bool(head.probe),
    )


def prompt_groups(rows: Sequence[PackedSample]) -> list[PromptGroup]:
    """The prompts of some trajectories and their groups, in order."""
    return sorted({(row.prompt, row.group, row.probe) for row in rows})


def prompt_groups_of(heads: Iterable[bytes]) -> list[PromptGroup]:
    """The same of stored heads, for steps that were kept before their prompts were noted."""
    found = map(orjson.loads, heads)
    return joined(
        (), [(prompt_of(h.get("question"), h["group"]), h["group"], bool(h.get("probe"))) for h in found]
    )


def unpacked(body: bytes) -> SampledTrajectory:
    """The trajectory of a stored body."""
    return SampledTrajectory.model_validate_json(zlib.decompress(body))


def unpacked_head(head: bytes) -> SampleHead:
    """The head that was stored with it."""
    return SampleHead.model_validate_json(head)


def refuse_overfull(run: str, step: int, trajectories: int, size: int) -> None:
    """Raise UserError for a step that would hold more than it may."""
    if trajectories > MAX_STEP_SAMPLES or size > MAX_STEP_PACKED:
        raise UserError(
            f"run {run}: step {step} would hold {trajectories} trajectories token by token, {size} bytes "
            f"packed; at most {MAX_STEP_SAMPLES} and {MAX_STEP_PACKED} accepted"
        )
