"""The errors of this package that somebody catches by type; others are those of services.common.errors."""

from __future__ import annotations

from services.common.errors import EnvironmentLacks, UnspiralError, UserError


class IndexInvalid(UserError):
    """An index folder that is missing, torn, of another version, or of another corpus than the given one."""


class OtherFormat(IndexInvalid):
    """An index folder in the format of another version. `deploy/docker/build_index.py` builds it again."""


class RetrieverUnavailable(EnvironmentLacks):
    """The retriever did not answer by the deadline; the message names its address."""


class RequestRefused(UserError):
    """A request that is wrong in itself, whoever is asked; `status` is the HTTP status. It says nothing about
    the health of a server."""


class QueueFull(UnspiralError):
    """The bounded queue has no room; try again after `retry_after_seconds`."""

    status = 503
    explained = True

    def __init__(self, line: str, retry_after_seconds: int = 1) -> None:
        super().__init__(line)
        self.retry_after_seconds = retry_after_seconds


class DeadlinePassed(UnspiralError):
    """A request was not answered within its deadline."""

    status = 504
    explained = True
