"""The errors of this package that somebody catches by type; others are those of services.common.errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from services.common.errors import EnvironmentLacks, UnspiralError, UserError


class IndexInvalid(UserError):
    """An index folder that is missing, torn, of another version, or of another corpus than the given one.
    other_format: it is whole, but another version of this program wrote it."""

    def __init__(self, line: str, *, other_format: bool = False) -> None:
        super().__init__(line)
        self.other_format = other_format


@contextmanager
def damaged(what: str) -> Iterator[None]:
    """Around the opening of files of an index, which a kill or a full disk may have cut short: raises
    IndexInvalid. what: the file, and what is wrong with it."""
    try:
        yield
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise IndexInvalid(f"{what} ({error}); build the index again") from None


class RetrieverUnavailable(EnvironmentLacks):
    """The retriever did not answer by the deadline; the message names its address."""


Limit = int | float | str | None
"""What a field accepts; null where no field is wrong."""


class RequestRefused(UserError):
    """A request that is wrong in itself, whoever is asked: an HTTP status, and the fields of ErrorBody. It
    says nothing about the health of a server."""

    def __init__(self, status: int, detail: str, field: str | None = None, limit: Limit = None) -> None:
        super().__init__(detail, status=status, field=field)
        self.detail = detail
        self.limit = limit


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
