"""Errors of the rollout that somebody catches by type. All others are raised as the three of the family."""

from __future__ import annotations

from services.common.errors import UnspiralError


class WorkerLostError(UnspiralError):
    """A worker has died, hangs, or its engine is dead; it must be replaced."""


class WorkerUnavailableError(UnspiralError):
    """This worker runs no trajectory now, or gave one up; another worker may run it."""
