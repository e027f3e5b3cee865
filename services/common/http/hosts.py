"""Under which names a service may be asked for while nothing but its address protects it.

A foreign page can make a name of its own mean this machine (DNS rebinding), and a browser then lets it read
whatever answers. It cannot choose what the browser writes into `Host`: its own name. So a service without a
token answers only to names that no stranger can own.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from functools import lru_cache

ALLOWED_VARIABLE = "UNSPIRAL_ALLOWED_HOSTS"
"""Further names that services may be asked for by, separated by commas."""
RESERVED = (".localhost", ".local", ".internal", ".home.arpa", ".lan", ".svc", ".test")
"""Ends of names that no registry sells."""


def allowed_hosts() -> frozenset[str]:
    """The names in UNSPIRAL_ALLOWED_HOSTS."""
    names = os.environ.get(ALLOWED_VARIABLE, "").lower().split(",")
    return frozenset(name.strip() for name in names if name.strip())


_HOST = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+(?:%[\w.~-]+)?)\]|(?P<name>[^\s\[\]:/?#@\\]+))(?::(?P<port>[0-9]{0,5}))?",
    re.ASCII,
)
"""A `Host` header (RFC 9110, 7.2): an IPv6 address in brackets, perhaps with a zone, or a name; then perhaps
a port. Nothing may stand between bracket and port: urlsplit takes `[::1]evil.example` for `::1`."""


def name_of(header: str) -> str | None:
    """The lower-case name or address in a `Host` header, without its port; None for what is no host."""
    found = _HOST.fullmatch(header)
    if found is None or int(found["port"] or 0) > 65535:
        return None
    return (found["six"] or found["name"]).lower()


@lru_cache(maxsize=1024)
def is_loopback(host: str) -> bool:
    """Whether a host or address means this machine alone."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    address = _address(host)
    return address is not None and address.is_loopback


@lru_cache(maxsize=1024)
def is_ours(header: str, server: str, allowed: frozenset[str]) -> bool:
    """Whether a request with this `Host`, which arrived at address `server`, is meant for this service.

    At a loopback address: loopback names. At any other: addresses, names of one label, names with a reserved
    end, and this machine's own. Anywhere: those in `allowed`.
    """
    name = name_of(header)
    if not name:
        return False
    if name in allowed or is_loopback(name):
        return True
    if is_loopback(server):
        return False
    if "." not in name or name.endswith(RESERVED):
        return True
    return _address(name) is not None or name in _own_names()


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a name is; None where it is a name indeed."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _own_names() -> set[str]:
    return {socket.gethostname().lower(), socket.getfqdn().lower()}
