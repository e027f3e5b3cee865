"""Messages of libraries, as they are told to users. It imports next to nothing: the command line
starts with it."""

import re

_NUMBER = re.compile(r"^\[Errno -?\d+\] ")
_PREFIX = "Value error, "
"""Pydantic puts it before what a validator of ours says."""


def said(message: str) -> str:
    """A message of pydantic, without the words that it puts before ours; also where Typer, which converts by
    it, has put the option before them."""
    return message.removeprefix(_PREFIX).replace(f": {_PREFIX}", ": ", 1)


def said_by(error: Exception) -> str:
    """What an error of a library says, such as `Connection refused`, without the number of the system; the
    name of its kind where it says nothing."""
    return _NUMBER.sub("", " ".join(str(error).split())) or type(error).__name__
