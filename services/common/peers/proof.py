"""How a run proves to a gateway that it holds the token, before the gateway sends it there.

Whoever can write to Ray's key-value store can announce a run at an address of theirs. So the gateway sends a
nonce, and takes only an HMAC of it under the token for an answer. What is signed holds the address at which
the connection arrived, which the gateway compares with the one that it has connected to: passing on the
answer of a real run does not help.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import secrets

Address = tuple[str, int]
"""IP address and port of one end of a connection."""


def new_nonce() -> str:
    return secrets.token_hex(16)


def proof(token: str, nonce: str, id: str, address: Address) -> str:
    """The answer to a nonce of whoever serves run `id` at `address`; 64 hexadecimal digits."""
    said = json.dumps(["unspiral control plane", nonce, id, _plain(address[0]), address[1]])
    return hmac.new(token.encode(), said.encode(), hashlib.sha256).hexdigest()


def proven(given: object, token: str, nonce: str, id: str, address: Address) -> bool:
    expected = proof(token, nonce, id, address)
    return isinstance(given, str) and hmac.compare_digest(given.encode(), expected.encode())


def _plain(host: str) -> str:
    """An address as both ends see it: a socket of both families shows IPv4 as a part of IPv6."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)
