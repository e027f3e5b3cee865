"""Likelihood tracking and LLDS for any trainer: what the wheel `unspiral-health` installs.

    from unspiral_health import Run, EventRecord                 # post steps, read alarms
    from unspiral_health import LagMemory, padded_records        # the lag probe; records of padded batches
    from unspiral_health import detectors                        # the monitor without a service
    from unspiral_health import LLDS, llds_loss                  # the loss, which alone needs torch
    from unspiral_health.adapters import trl, verl, openrlhf, skyrl, slime

docs/any_trainer.md shows each trainer.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any

from services.common.errors import EnvironmentLacks, UnspiralError, UserError
from services.likelihood.client import LikelihoodClient
from services.likelihood.metrics.padded import LagMemory, padded_records
from services.likelihood.metrics.verdicts import is_right
from services.likelihood.records import EventRecord, StepRecord
from unspiral_health import detectors
from unspiral_health.run import Run

if TYPE_CHECKING:
    from unspiral_health.llds import LLDS, llds_loss

__all__ = [
    "EnvironmentLacks",
    "EventRecord",
    "LLDS",
    "LagMemory",
    "LikelihoodClient",
    "Run",
    "StepRecord",
    "UnspiralError",
    "UserError",
    "detectors",
    "is_right",
    "llds_loss",
    "padded_records",
]
NEED_TORCH = ("LLDS", "llds_loss")
DISTRIBUTIONS = ("unspiral-health", "unspiral")
"""The thin wheel, and the whole of Unspiral, whose checkout has this package too."""


def __getattr__(name: str) -> Any:
    """The loss is imported when it is first asked for: a program that only posts needs no torch."""
    if name in NEED_TORCH:
        return getattr(importlib.import_module("unspiral_health.llds"), name)
    if name == "adapters":
        return importlib.import_module("unspiral_health.adapters")
    if name == "__version__":
        for distribution in DISTRIBUTIONS:
            with suppress(metadata.PackageNotFoundError):
                return metadata.version(distribution)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What a notebook completes: what is imported when it is first asked for, too."""
    return sorted({*globals(), *__all__, "__version__", "adapters"})
