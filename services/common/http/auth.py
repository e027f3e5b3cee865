"""The token of a service: where it comes from, when it must be set, and the cookie that stands for it in a
browser."""

from __future__ import annotations

import hashlib
import hmac
import os

from services.common.errors import UserError
from services.common.http.hosts import is_loopback

TOKEN_VARIABLE = "UNSPIRAL_API_TOKEN"
COOKIE = "unspiral_likelihood"


def required_token(host: str, token: str | None = None) -> str | None:
    """The token to ask for: the one given, or UNSPIRAL_API_TOKEN.

    Raises UserError for a wider host without one.
    """
    token = token or token_of(TOKEN_VARIABLE)
    refuse_wide_without_token(host, token, f"set {TOKEN_VARIABLE}")
    return token


def token_of(variable: str) -> str | None:
    """The token in a variable of the environment, without the line break that files of secrets end with; None
    without one.

    Raises UserError for a token that no header can carry; it does not show it.
    """
    token = os.environ.get(variable, "").strip()
    for place, character in enumerate(token, 1):
        if not "!" <= character <= "~":
            found = f"character {place} is U+{ord(character):04X}"
            raise UserError(f"{variable}: {found}; printable ASCII without spaces is accepted")
    return token or None


def refuse_wide_without_token(host: str, token: str | None, remedy: str) -> None:
    """Raise UserError, naming the remedy, for a host beyond this machine without a token."""
    if token is None and not is_loopback(host):
        shown = host or "''"
        raise UserError(f"host {shown}: reachable from other machines, so {remedy}, or bind to 127.0.0.1")


def is_bearer(header: bytes, token: str) -> bool:
    """Whether an `Authorization` header carries the token."""
    kind, _, given = header.partition(b" ")
    return kind.lower() == b"bearer" and hmac.compare_digest(given.strip(), token.encode())


def cookie_of(token: str) -> str:
    """The value of the cookie: derived from the token, so that it does not hold it."""
    return hmac.new(token.encode(), b"unspiral likelihood page", hashlib.sha256).hexdigest()
