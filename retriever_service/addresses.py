"""Addresses of servers, as users give them."""

from __future__ import annotations

import httpx

from services.common.errors import UserError


def check_address(what: str, given: str, accepted: str) -> None:
    """Raises UserError for what is no http address of a server. what: the option or key that it is of."""
    try:
        parts = httpx.URL(given)
    except httpx.InvalidURL as error:
        raise UserError(f"{what} {given!r}: no address ({error}); {accepted}") from None
    of_server = parts.scheme in ("http", "https") and parts.host and not any(map(str.isspace, given))
    if not of_server or parts.query or parts.fragment:
        raise UserError(f"{what} {given!r}: {accepted}")
    if parts.port is not None and not 0 < parts.port < 65536:
        raise UserError(f"{what} {given!r}: port {parts.port}; {accepted}, PORT from 1 to 65535")
