"""Memory that runs out in a learner rank: the line names what was asked for, and settings that need less."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from ray.exceptions import RayTaskError

from trainer.config.learner import LearnerSettings
from trainer.learner import group
from trainer.learner.group import LearnerError, LearnerGroup
from trainer.learner.lack_of_memory import lack_of_memory
from trainer.learner.rank_handle import Pending

OF_TORCH = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of 139.80 GiB of which 1 GiB "
    "is free. Including non-PyTorch memory, this process has 138.60 GiB memory in use. "
    + "Of the cache. "
    * 40
)


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError(OF_TORCH), " (CUDA out of memory. Tried to allocate 2.00 GiB. "),
        (MemoryError(), ";"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            " (Default",
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), " (CUDA error"),
    ],
)
def test_what_was_asked_for_is_told_with_the_settings_that_need_less(monkeypatch, error, asked):
    def get(ref):
        raise RayTaskError("update", "a traceback", error)

    monkeypatch.setattr(group.ray, "get", get)
    of = SimpleNamespace(ranks=2, config=SimpleNamespace(learner=LearnerSettings(ranks=2, zero_stage=1)))
    with pytest.raises(LearnerError) as caught:
        LearnerGroup._result(of, Pending(None, 1, "update"))
    line = str(caught.value)
    assert line.startswith(f"learner rank 1 of 2: update ran out of memory{asked}") and len(line) < 400
    assert line.endswith(
        "; a learner.tokens_per_microbatch below 16384, learner.zero_stage=2, learner.offload_optimizer=true "
        "or learner.lora needs less"
    )


def test_only_settings_that_are_open_are_named():
    tight = LearnerSettings(zero_stage=3, offload_optimizer=True, gradient_checkpointing=True, lora=None)
    assert lack_of_memory(MemoryError(), tight) == (
        "; a learner.tokens_per_microbatch below 16384 or learner.lora needs less"
    )
    plain = LearnerSettings(zero_stage=0, lora={"rank": 4}, tokens_per_microbatch=512)
    assert lack_of_memory(MemoryError(), plain) == "; a learner.tokens_per_microbatch below 512 needs less"


def test_another_error_is_none_of_memory():
    for error in (None, RuntimeError("a token id is outside"), ValueError("out of memory")):
        assert lack_of_memory(error, LearnerSettings()) == ""
