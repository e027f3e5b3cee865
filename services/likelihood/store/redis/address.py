"""Addresses of a Redis store, as users write them."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from services.common.errors import UserError


def shown(url: str) -> str:
    """The address without a password, for messages."""
    return url.split("@")[-1].removeprefix("redis://").removeprefix("rediss://")


def check(url: str) -> None:
    """Raises ValueError where Redis' library would take another host or database than was written."""
    parts = urlsplit(url)
    database = unquote(parts.path).strip("/")
    if parts.scheme != "unix" and not parts.hostname:
        raise ValueError("no host is there")
    if parts.scheme != "unix" and database and not database.isdecimal():
        raise ValueError(f"{database!r} is no number")


def refused(url: str, error: Exception) -> UserError:
    """What is wrong with an address, from an error of `check` or of the library."""
    why = str(error).rpartition("__init__() ")[2]
    return UserError(f"store {shown(url)!r}: expected redis://HOST:PORT/DB, DB a number ({why})")


def why_not(error: Exception) -> str:
    """What a server's refusal means."""
    said = str(error) or type(error).__name__
    if type(error).__name__ == "AuthenticationError" or "HELLO must be called" in said:
        said = "it asks for a password, or for another one: redis://:PASSWORD@HOST:PORT/DB"
    return said.removesuffix(".")
