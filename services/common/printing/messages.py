"""Messages of libraries, as they are told to users. It imports nothing: the command line starts with it."""

_PREFIX = "Value error, "
"""Pydantic puts it before what a validator of ours says."""


def said(message: str) -> str:
    """A message of pydantic, without the words that it puts before ours; also where Typer, which converts by
    it, has put the option before them."""
    return message.removeprefix(_PREFIX).replace(f": {_PREFIX}", ": ", 1)
