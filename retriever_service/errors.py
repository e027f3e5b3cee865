"""Errors that a user can act on. `str()` is one line; `exit_code` is what the command line exits with."""

from __future__ import annotations

from services.common.errors import UserError


class RetrieverError(UserError):
    """Base of this package's errors. `exit_code`: 2 bad usage or data, 3 the environment lacks something, 1
    anything else."""

    exit_code = 1


class CorpusError(RetrieverError):
    """A corpus that can't be read. The message names file and line, and says what was expected."""

    exit_code = 2


class IndexInvalid(RetrieverError):
    """An index folder that is missing, torn, of another version, or of another corpus than the one given."""

    exit_code = 2


class OtherFormat(IndexInvalid):
    """An index folder that another version made."""


class BadSetting(RetrieverError):
    """A setting or flag that makes no sense; the message names it and what is accepted."""

    exit_code = 2


class EnvironmentLacks(RetrieverError):
    """Something that the machine must have: a free port, disk, a package, a model."""

    exit_code = 3


class RetrieverUnavailable(RetrieverError):
    """The retriever did not answer by the deadline; the message names its address."""

    exit_code = 3


class RequestRefused(RetrieverError):
    """The retriever answered that the request itself is wrong (4xx): trying again would not help."""

    exit_code = 2


class QueueFull(RetrieverError):
    """The bounded queue has no room; try again after `retry_after_seconds`."""

    def __init__(self, message: str, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class DeadlinePassed(RetrieverError):
    """A request was not answered within its deadline."""
