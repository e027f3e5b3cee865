"""Asking a run's control plane at the address that it announced, with the token that both sides hold.

Anybody may have written the address down, and a killed run's port may be another program's by now. Who
answers there must first show that it is the run (its id) and that it holds the token (proof.py); until then
it is sent neither token nor request.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import httpx

from services.common.answers import object_of, read_json
from services.common.errors import EnvironmentLacks, UnspiralError, UserError
from services.common.peers.proof import new_nonce, proven
from services.common.printing.messages import said_by

log = logging.getLogger("unspiral.control")

LOOK_SECONDS = 3.0
"""Longest wait for the health check of a run that may be dead."""
ANSWER_SECONDS = 20.0
"""Longest wait for a run's answer to a request."""
MAX_HEALTH_BYTES = 4096


class Peer(NamedTuple):
    """A run's control plane, as it was announced."""

    run: str
    id: str
    """What its health check answers with."""
    url: str


async def is_there(http: httpx.AsyncClient, peer: Peer, token: str | None) -> bool:
    """Whether the run itself answers at its address, and with a token: whether it holds the same."""
    nonce = new_nonce()
    try:
        request = http.stream("GET", peer.url + "/healthz", params={"nonce": nonce} if token else None)
        async with request as answer:
            there = answer.extensions["network_stream"].get_extra_info("server_addr")
            about = read_json(await _little(answer))
        if not answer.is_success or about["run"] != peer.id:
            return False
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return False
    if token is None or proven(about.get("proof"), token, nonce, peer.id, (there[0], there[1])):
        return True
    log.warning("run %s at %s does not hold this UNSPIRAL_API_TOKEN: it is passed over", peer.run, peer.url)
    return False


async def ask(url: str, token: str | None, method: str, path: str, body: Any = None) -> httpx.Response:
    """A run's answer to a request. Raises EnvironmentLacks (504) where none comes."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(headers=headers, timeout=ANSWER_SECONDS, trust_env=False) as http:
        try:
            return await http.request(method, url + path, json=body)
        except httpx.HTTPError as e:
            what = f"the run at {url} does not answer: {said_by(e)}"
            raise EnvironmentLacks(what, status=504) from e


async def _little(answer: httpx.Response) -> bytes:
    """The body, as far as that of a health check may be long; whoever answers is not known yet."""
    body = b""
    async for part in answer.aiter_bytes():
        body += part
        if len(body) > MAX_HEALTH_BYTES:
            raise ValueError("too long for a health check")
    return body


def refusal(answer: httpx.Response) -> UnspiralError:
    """What a control plane refused, with the status and the line that it had there."""
    status = answer.status_code
    where = f"{answer.request.url}: HTTP {status}"
    if not answer.is_error:
        return EnvironmentLacks(f"{where}; what answers there is no control plane of a run")
    said = object_of(answer.content).get("detail")
    if said is None:  # an ingress, or whatever else answers there
        return EnvironmentLacks(where, status=status)
    detail = " ".join(str(said).split())[:500]
    if status in (401, 403, 409, 500, 502, 503, 504):
        return EnvironmentLacks(detail, status=status)
    return UserError(detail, status=status)
