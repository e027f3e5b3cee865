"""What a search service says of itself: the part of a protocol that moves numbers most."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import httpx

from services.common.answers import object_of
from trainer.suite.protocol import UNKNOWN

SECONDS = 10.0
"""Longest wait for a service's description of itself."""


async def retriever_facts(url: str) -> dict[str, Any]:
    """Backend, passages, corpus (start of its SHA-256) and encoder of the service at an address. The encoder
    is what ranks, with its settings, as JSON text. Facts that a service does not tell are `unknown`:
    Search-R1's own server tells none."""
    said: dict[str, Any] = {}
    with suppress(httpx.HTTPError):
        async with httpx.AsyncClient(trust_env=False, timeout=SECONDS) as http:
            said = object_of((await http.get(f"{url.rstrip('/')}/readyz")).content)
    return {
        "backend": said.get("backend", UNKNOWN),
        "passages": said.get("passages", UNKNOWN),
        "corpus": str(said.get("corpus_sha256") or UNKNOWN)[:12],
        "encoder": json.dumps(said["settings"], sort_keys=True) if said.get("settings") else UNKNOWN,
    }
