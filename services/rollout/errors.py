"""Errors of the rollout that somebody catches by type. All others are raised as the three of the family."""

from __future__ import annotations

from services.common.errors import EnvironmentLacks, UnspiralError


class NoWorkersError(EnvironmentLacks):
    """No rollout worker serves, and none will come without help from outside."""


class UnschedulableError(EnvironmentLacks):
    """The cluster lacks the resources that a worker asks for; the message lists demand against supply."""


class WorkerLostError(UnspiralError):
    """A worker has died, hangs, or its engine is dead; it must be replaced."""


class WorkerUnavailableError(UnspiralError):
    """This worker runs no trajectory now, or gave one up; another worker may run it."""


class NonFiniteLogprobError(UnspiralError):
    """The sampler reported a log-prob that is not finite: the trajectory must not be trained on."""
