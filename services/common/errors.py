"""The errors that one line explains.

`str()` of each is that line: it names the key, file or address, and what is accepted. Raise one of the three
as it is, with another status where the default does not fit; make a class of its own only where somebody
catches that class.
"""

from __future__ import annotations


class UnspiralError(Exception):
    """Base of the family.

    `exit_code` is the exit status of a command, `status` the HTTP status of a service that the error ends.
    Both have a default per class; `UserError(line, status=404)` overrides it for one error.
    """

    exit_code = 1
    status = 500

    def __init__(self, line: str = "", *, exit_code: int | None = None, status: int | None = None) -> None:
        super().__init__(line)
        # Set on the instance alone, and only if given: pickling keeps them, and class defaults stay visible.
        if exit_code is not None:
            self.exit_code = exit_code
        if status is not None:
            self.status = status


class UserError(UnspiralError):
    """A setting, file or request that is wrong; the message says what is accepted."""

    exit_code = 2
    status = 422


class EnvironmentLacks(UnspiralError):
    """The machine or the cluster lacks a port, disk, a package, or a service that answers."""

    exit_code = 3
    status = 503
