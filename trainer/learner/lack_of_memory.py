"""What to say where memory ran out in a rank: what it asked for, and the settings that need less."""

from __future__ import annotations

import torch

from trainer.config.learner import LearnerSettings

_SAID = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")
"""What cuBLAS, CUDA and the allocator on the CPU write, which raise a plain RuntimeError."""
_LONGEST = 160


def lack_of_memory(error: BaseException | None, settings: LearnerSettings) -> str:
    """The end of that line; empty where something else went wrong."""
    said = " ".join(str(error).split())
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if not known and not (isinstance(error, RuntimeError) and any(word in said.lower() for word in _SAID)):
        return ""
    # PyTorch's line goes on with the whole state of its cache; what was asked for stands in its beginning.
    asked = said if len(said) <= _LONGEST else said[:_LONGEST].rpartition(" ")[0] + " ..."
    ways = [f"a learner.tokens_per_microbatch below {settings.tokens_per_microbatch}"]
    if settings.gradient_checkpointing is not True and settings.zero_stage == 3:
        ways.append("learner.gradient_checkpointing=true")  # the other stages have it on by then
    if settings.ranks > 1 and settings.zero_stage < 3:
        ways.append(f"learner.zero_stage={settings.zero_stage + 1}")
    if settings.zero_stage and not settings.offload_optimizer:
        ways.append("learner.offload_optimizer=true")
    if settings.lora is None:
        ways.append("learner.lora")
    return (
        f"{asked and f' ({asked})'}; {', '.join(ways[:-1])}{' or ' if ways[1:] else ''}{ways[-1]} needs less"
    )
