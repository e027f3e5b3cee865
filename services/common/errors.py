"""The errors that one line explains.

`str()` of each is that line: it names the key, file or address, and what is accepted. Raise one of the three as
it is; make a class of its own only where somebody catches that class.
"""

from __future__ import annotations


class UnspiralError(Exception):
    """Base of the family. `exit_code` is what a command ends with, `status` what an HTTP service answers."""

    exit_code = 1
    status = 500


class UserError(UnspiralError):
    """A setting, file or request that is wrong; the message says what is accepted."""

    exit_code = 2
    status = 422


class EnvironmentLacks(UnspiralError):
    """Something that the machine or the cluster must have: a port, disk, a package, a service that answers."""

    exit_code = 3
    status = 503
