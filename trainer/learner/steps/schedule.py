"""The learning rate over a run, as a factor on `learner.lr`. Pure: batch and step numbers in, a factor out.

What it depends on is in every checkpoint (the learner's counters) and in the configuration, so a resumed run
goes on at the same rate.
"""

from __future__ import annotations

import math

from trainer.config.learner import LearnerSettings


def lr_factor(settings: LearnerSettings, *, batch: int, optimiser_step: int, batches: int) -> float:
    """Warm-up times schedule. batch, optimiser_step: those that came before, from 0; batches: of the whole
    run (`trainer.steps`). Past the end the last value holds."""
    warm_batches = warmup_batches(settings, batches)
    # From the first step on above 0: a step at a rate of 0 would only fill Adam's moments.
    warm = min(1.0, (optimiser_step + 1) / max(settings.warmup_steps, 1))
    if warm_batches:
        warm = min(1.0, (batch + 1) / warm_batches)
    return warm * _decayed(settings, batch - warm_batches, batches - warm_batches)


def warmup_batches(settings: LearnerSettings, batches: int) -> int:
    """Batches of warm-up, by either key."""
    return settings.warmup_batches or math.ceil(settings.warmup_share * batches)


def _decayed(settings: LearnerSettings, batch: int, batches: int) -> float:
    """1 at the first batch after the warm-up, `schedule_floor` at the last one."""
    if settings.schedule == "constant" or batch <= 0:
        return 1.0
    done = min(1.0, batch / max(batches - 1, 1))
    share = 1.0 - done if settings.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return settings.schedule_floor + (1.0 - settings.schedule_floor) * share
