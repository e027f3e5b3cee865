"""Asking one shard over HTTP: an address, or several of replicas that hold the same index."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from retriever_service.addresses import check_address
from retriever_service.errors import RequestRefused, RetrieverUnavailable
from retriever_service.refusals import detail_of, reason_of
from retriever_service.shards import wire
from services.common.errors import UserError
from services.common.validation import fitting

_REFUSALS = (400, 413, 422)
"""Statuses by which a shard refuses what a client of the server before it has asked."""
_ACCEPTED = "http://HOST:PORT or https://HOST:PORT is accepted; commas separate shards, | replicas of one"


class Unavailable(RetrieverUnavailable):
    """A shard did not answer; the message names it. other_version: it serves another index by now."""

    def __init__(
        self, shard: Shard, reason: str, *, loading: bool = False, other_version: bool = False
    ) -> None:
        super().__init__(f"shard {shard.name}: {reason}")
        self.shard = shard
        self.loading = loading
        self.other_version = other_version


@dataclass
class Content:
    """The index of a shard, and what is known of it."""

    about: wire.About
    frequencies: dict[str, int] = field(default_factory=dict)
    """How many of its passages have each term, as far as it was asked."""


class Shard:
    """One shard. `content` is set once it was looked at."""

    def __init__(self, addresses: list[str], http: httpx.AsyncClient) -> None:
        self.name = "|".join(addresses)
        self.content: Content | None = None
        self.out_until = 0.0
        """Time (monotonic) until which it is left out, where partial answers are allowed."""
        self._addresses = addresses
        self._http = http
        self._at = 0

    @property
    def known(self) -> Content:
        """What its index is."""
        assert self.content is not None  # all shards are looked at when the index is opened
        return self.content

    async def look(self, until: float) -> wire.About:
        """What its index is now. Raises Unavailable."""
        answer = await self._first("GET", wire.ABOUT, None, until)
        what = f"its answer to {wire.ABOUT} is none of this package's; expected `unspiral serve retriever`"
        with fitting(lambda mistakes: Unavailable(self, what)):
            return wire.About.model_validate_json(answer)

    async def ask(self, path: str, content: Content, asked: dict[str, Any], until: float) -> dict[str, Any]:
        """The answer to a POST by the index of this content. Raises Unavailable, and RequestRefused
        where no replica takes the request and one says that it is wrong."""
        body = orjson.dumps({"version": content.about.version, **asked})
        answer = await self._first("POST", path, body, until)
        try:
            found = orjson.loads(answer)
        except orjson.JSONDecodeError:
            raise Unavailable(self, f"its answer to {path} is no JSON") from None
        if not isinstance(found, dict):
            raise Unavailable(self, f"its answer to {path} is no object")
        return found

    async def _first(self, method: str, path: str, body: bytes | None, until: float) -> bytes:
        """The answer of the first replica that gives one, beginning with the one that gave the last."""
        count = len(self._addresses)
        reasons = []
        others = 0
        loading = 0
        refused: tuple[int, str] | None = None
        for turn in range(count):
            at = (self._at + turn) % count
            left = until - time.monotonic()
            seconds = max(0.001, left / (count - turn))
            address = self._addresses[at]
            try:
                async with asyncio.timeout(seconds):
                    answer = await self._http.request(
                        method, address + path, content=body, headers={"x-timeout-seconds": f"{seconds:.3f}"}
                    )
            except (TimeoutError, httpx.HTTPError) as error:
                late = isinstance(error, TimeoutError)
                reasons.append(f"no whole answer within {seconds:.3g} s" if late else reason_of(error))
                continue
            if answer.status_code == 200:
                self._at = at
                return answer.content
            if answer.status_code == wire.OTHER_VERSION:
                others += 1
            loading += answer.status_code == 503
            reasons.append(detail_of(answer))
            if answer.status_code in _REFUSALS:
                refused = refused or (answer.status_code, f"shard {self.name}: {reasons[-1]}")
        if refused is not None:
            raise RequestRefused(*refused)
        if others:
            raise Unavailable(self, "serves another index by now", other_version=True)
        if count > 1:
            reasons = [f"{a}: {why}" for a, why in zip(self._in_turn(), reasons, strict=True)]
        raise Unavailable(self, "; ".join(reasons), loading=bool(loading))

    def _in_turn(self) -> list[str]:
        return self._addresses[self._at :] + self._addresses[: self._at]


def parse(given: str) -> list[list[str]]:
    """The addresses of each shard. Raises UserError."""
    shards = [[address.strip().rstrip("/") for address in one.split("|")] for one in given.split(",")]
    seen: set[str] = set()
    for address in (address for one in shards for address in one):
        check_address("--shards", address, _ACCEPTED)
        if address in seen:
            raise UserError(f"--shards {address}: given twice; each address once")
        seen.add(address)
    return shards
