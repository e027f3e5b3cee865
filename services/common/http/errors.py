"""The base of the errors that a service gives to its callers."""

from __future__ import annotations


class OneLineError(Exception):
    """A mistake that one line explains. `exit_code` is the command's, `status` the HTTP answer's."""

    exit_code = 2
    status = 422
