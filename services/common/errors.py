"""The errors that one line explains.

`str()` of each is that line: it names the key, file or address, and what is accepted. Raise one of the three
as it is, with another status where the default does not fit; make a class of its own only where somebody
catches that class.
"""

from __future__ import annotations


class UnspiralError(Exception):
    """Base of the family; raised as it is, a fault of ours.

    `exit_code` is the exit status of a command, `status` the HTTP status of a service that the error ends.
    Where `explained` is set, the line tells a user enough; otherwise a command shows the traceback, and a
    service answers "internal error". Each has a default per class, and `UserError(line, status=404)`
    overrides it for one error.

    `field` names the field of a request that is wrong, where a service tells it apart from the line.

    An override does not cross Ray: what `ray.get` raises reads the defaults of the class, and the values are
    those of its `cause`. An error that leaves an actor with another status has a class of its own.
    """

    exit_code = 1
    status = 500
    explained = False
    field: str | None = None

    def __init__(
        self,
        line: str = "",
        *,
        exit_code: int | None = None,
        status: int | None = None,
        explained: bool | None = None,
        field: str | None = None,
    ) -> None:
        super().__init__(line)
        # Set on the instance alone, and only if given: pickling keeps them, and class defaults stay visible.
        if exit_code is not None:
            self.exit_code = exit_code
        if status is not None:
            self.status = status
        if explained is not None:
            self.explained = explained
        if field is not None:
            self.field = field


class UserError(UnspiralError):
    """A setting, file or request that is wrong; the message says what is accepted."""

    exit_code = 2
    status = 422
    explained = True


class EnvironmentLacks(UnspiralError):
    """The machine or the cluster lacks a port, disk, a package, or a service that answers."""

    exit_code = 3
    status = 503
    explained = True


def explains(error: BaseException) -> bool:
    """Whether the error's line is all that a user needs. Of a class outside the family: if it has an exit
    status."""
    return bool(getattr(error, "explained", hasattr(error, "exit_code")))
