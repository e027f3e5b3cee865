"""The retriever's client, for agent loops: asynchronous, pooled, patient.

Connection errors, time-outs, answers that cannot be read, 404, 408, 425, 429 and 5xx (an ingress gives them
while a server restarts), and 401 and 403 after a good answer, are tried again with back-off until the
deadline, then RetrieverUnavailable is raised. What refuses the request itself is not tried again. An outage
never turns into an empty result.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import httpx
import orjson
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from retriever_service.addresses import check_address
from retriever_service.answer import Answer, Hit, read_answer
from retriever_service.errors import RetrieverUnavailable
from retriever_service.joining import Joiner
from retriever_service.refusals import detail_of, reason_of
from services.common.errors import UserError

__all__ = ["MAX_QUERY_CHARS", "NO_SUCH_ROUTE", "Hit", "RetrieverClient", "clean_query"]

log = logging.getLogger("retriever_service")
MAX_QUERY_CHARS = 8192
"""Longest query that is sent; longer ones are cut."""
_MOST_BACK_OFF_SECONDS = 5.0
"""Longest pause between two tries."""
_CONNECTIONS = 256
"""Most open connections, and so most requests in flight."""
NO_SUCH_ROUTE = (404, 405, 501)
"""Answers of a server that is up and has no `/readyz`, as Search-R1's own and its forks: 501 is what Python's
`http.server` says where a handler knows POST alone."""
_AGAIN = (404, 408, 425, 429)
"""Statuses that are tried again besides 5xx: an ingress gives them while its server restarts."""
_BARRED = (401, 403)
"""Statuses that are tried again by a client that was let in before: what guards the server is restarted."""
_TELL_SECONDS = 15.0
"""Seconds between two messages of `wait_ready`."""
_ON_THE_LOOP_BYTES = 1 << 20
"""Largest answer that is parsed in the event loop; a larger one would hold up other trajectories."""
_SHOWN_CHARS = 100
"""Of a query, in an error."""
_LONG_SECONDS = 10.0
"""Searches that have waited at least this long, or half of their time, are named by `waits`."""


class _Transient(Exception):
    """A failure that is worth another try, after `wait` seconds at least (the server's Retry-After).

    One that is `cut_off` ended with the search's own time: it says nothing about the server.
    """

    def __init__(
        self, reason: str, wait: float = 0.0, *, lacks: str = "no answer", cut_off: bool = False
    ) -> None:
        super().__init__(reason)
        self.wait = wait
        self.lacks = lacks
        self.cut_off = cut_off


def _failure(state: RetryCallState) -> _Transient:
    """The failure that is about to be tried again: AsyncRetrying lets no other error through."""
    error = state.outcome.exception() if state.outcome is not None else None
    assert isinstance(error, _Transient)
    return error


class RetrieverClient:
    """Client of one retriever. Make one per event loop, and share it between all coroutines.

    Raises UserError for a `url` that is no http address, and for a `token` that no header can carry.
    """

    def __init__(
        self, url: str, *, timeout_seconds: float = 60.0, token: str | None = None, join_seconds: float = 0.0
    ) -> None:
        """join_seconds: single queries that come within so long of each other go as one request. 0 joins
        none."""
        self.url = url.rstrip("/")
        self.timeout_seconds = timeout_seconds
        check_address("retriever url", url, "http://HOST:PORT or https://HOST:PORT is accepted")
        _check_token(token)
        headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {token}"} if token else {}
        )
        limits = httpx.Limits(
            max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS, keepalive_expiry=60
        )
        # httpx's own pool walks over all waiting requests whenever one comes or goes: a thousand of them
        # would hold the loop for seconds. So they wait here instead.
        self._connections = asyncio.Semaphore(_CONNECTIONS)
        self.left_out = 0
        """Hits without text that were left out, beside others of their query that had some."""
        self._joiner = Joiner(self._post, join_seconds)
        self._closed = self._answered = False
        self._searches: dict[object, tuple[float, str]] = {}
        """The searches that run: the time of their start (monotonic), and the last failure."""
        # No proxy from the environment: a retriever is a neighbour. No timeout: httpx's begins anew with each
        # piece that is read, so every request stands under an asyncio.timeout.
        self._http = httpx.AsyncClient(headers=headers, limits=limits, timeout=None, trust_env=False)
        self._back_off = wait_random_exponential(multiplier=0.1, max=_MOST_BACK_OFF_SECONDS)

    async def retrieve(
        self, queries: Sequence[str], topk: int, *, on_failure: Callable[[str], None] | None = None
    ) -> list[list[Hit]]:
        """Hits of each query, in order, best first; fewer than `topk` where fewer passages match, none for a
        blank query.

        A hit needs text alone: id and score may be missing, odd characters are replaced, and a hit without
        text is left out where the query has others; the queries without any are asked again. Whatever a model
        wrote is a query: NUL characters and lone surrogates are replaced, and more than 8192 characters cut
        off. on_failure is told of each try that failed and is followed by another.
        Raises RetrieverUnavailable when no answer came within `timeout_seconds`, UserError when the
        request itself is wrong.
        """
        if not queries:
            return []
        cleaned = [clean_query(q) for q in queries]
        found: list[list[Hit] | None] = [None] * len(cleaned)
        joins = len(cleaned) == 1  # at its first try

        async def ask(left: float) -> list[list[Hit]]:
            nonlocal joins
            until = time.monotonic() + left
            if joins:
                joins = False
                found[0] = await self._joiner.ask(cleaned[0], topk, left)
            missing = [at for at, hits in enumerate(found) if hits is None]
            if missing:
                answer = await self._post([cleaned[at] for at in missing], topk, until - time.monotonic())
                for at, hits in zip(missing, answer.lists, strict=True):
                    found[at] = hits
                if answer.fault is not None:
                    raise _Transient(
                        f"its answer is not Search-R1's: {answer.fault}", lacks="no usable answer"
                    )
                self._joiner.note_good()
            return [hits for hits in found if hits is not None]  # none is, where there is no fault

        return await self._patiently(ask, on_failure)

    def waits(self) -> str:
        """One line about searches that take long and the reason; empty where none does."""
        now = time.monotonic()
        least = min(_LONG_SECONDS, self.timeout_seconds / 2)
        long = [(since, why) for since, why in self._searches.values() if now - since >= least]
        if not long:
            return ""
        since = min(began for began, _ in long)
        reason = next((why for _, why in long if why), "no answer yet")
        many = f"{len(long)} searches wait" if len(long) > 1 else "a search waits"
        return f"{many} for the retriever at {self.url}, for up to {now - since:.0f} s: {reason}"

    def _count(self, left_out: int) -> None:
        if left_out and not self.left_out:
            log.warning("retriever at %s: hits without text are left out", self.url)
        self.left_out += left_out

    async def wait_ready(self, timeout_seconds: float, on_wait: Callable[[str], None] | None = None) -> None:
        """Wait until the index is loaded. `on_wait` gets a line about it at once, and then every 15 s.

        Raises RetrieverUnavailable, naming the address, when the time is up.
        """
        until = time.monotonic() + timeout_seconds
        told = -_TELL_SECONDS
        while True:
            reason = await self._not_ready(max(0.1, until - time.monotonic()))
            if reason is None:
                return
            now = time.monotonic()
            if now >= until:
                raise RetrieverUnavailable(
                    f"retriever at {self.url}: not ready after {timeout_seconds:g} s: {reason}"
                )
            if on_wait and now - told >= _TELL_SECONDS:
                left = f"{until - now:.0f} s more at most"
                on_wait(f"waiting for the retriever at {self.url}, {left}: {reason}")
                told = now
            await asyncio.sleep(min(0.25, max(0.0, until - now)))

    async def aclose(self) -> None:
        """Close the connections. Searches that still wait end with RetrieverUnavailable."""
        self._closed = True
        await self._joiner.aclose()
        await self._http.aclose()

    async def __aenter__(self) -> RetrieverClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def _not_ready(self, timeout_seconds: float) -> str | None:
        seconds = min(5.0, timeout_seconds)
        try:
            async with asyncio.timeout(seconds):
                answer = await self._http.get(f"{self.url}/readyz")
        except TimeoutError:
            return f"/readyz: no whole answer within {seconds:.3g} s"
        except httpx.RequestError as error:
            return reason_of(error)
        return None if answer.status_code in (200, *NO_SUCH_ROUTE) else detail_of(answer)

    async def _patiently(
        self,
        attempt: Callable[[float], Awaitable[list[list[Hit]]]],
        on_failure: Callable[[str], None] | None = None,
    ) -> list[list[Hit]]:
        """The result of `attempt`, which gets the seconds that are left and is repeated while it may help."""
        started = time.monotonic()
        key = object()
        seen: list[_Transient] = []

        def left() -> float:
            return self.timeout_seconds - (time.monotonic() - started)

        def wait(state: RetryCallState) -> float:
            return max(self._back_off(state), _failure(state).wait)

        def stop(state: RetryCallState) -> bool:
            return state.upcoming_sleep >= left()

        def note(state: RetryCallState) -> None:
            self._joiner.note_bad()
            seen.append(_failure(state))
            reason = str(seen[-1])
            self._searches[key] = (started, reason)
            if on_failure:
                on_failure(reason)

        def give_up(state: RetryCallState) -> list[list[Hit]]:
            self._joiner.note_bad()
            reason = _failure(state)
            if reason.cut_off and seen:
                reason = seen[-1]
            what = f"{reason.lacks} within {self.timeout_seconds:g} s ({state.attempt_number} tries)"
            raise RetrieverUnavailable(f"retriever at {self.url}: {what}: {reason}") from None

        async def once() -> list[list[Hit]]:
            return await attempt(left())

        retrying = AsyncRetrying(
            wait=wait,
            stop=stop,
            retry=retry_if_exception_type(_Transient),
            retry_error_callback=give_up,
            before_sleep=note,
            sleep=asyncio.sleep,
        )
        self._searches[key] = (started, "")
        try:
            return await retrying(once)
        finally:
            del self._searches[key]

    async def _post(self, queries: list[str], topk: int, left: float) -> Answer:
        body = orjson.dumps({"queries": queries, "topk": topk, "return_scores": True})
        left = max(0.05, left)
        until = time.monotonic() + left
        try:
            async with asyncio.timeout(left), self._connections:
                if self._closed:
                    raise RetrieverUnavailable(f"retriever at {self.url}: its client is closed")
                seconds = max(0.001, until - time.monotonic())
                answer = await self._http.post(
                    f"{self.url}/retrieve", content=body, headers={"x-timeout-seconds": f"{seconds:.3f}"}
                )
        except TimeoutError:
            raise _Transient(f"no whole answer within {left:.3g} s", cut_off=True) from None
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:
            raise UserError(f"retriever at {self.url}: {type(error).__name__}: {error}") from None
        except httpx.DecodingError as error:
            raise _Transient(f"{type(error).__name__}: {error}", lacks="no usable answer") from None
        except httpx.TransportError as error:
            raise _Transient(reason_of(error)) from None
        if answer.status_code in _AGAIN or answer.status_code >= 500:
            raise _Transient(detail_of(answer), _retry_after(answer))
        if answer.status_code in _BARRED and self._answered:
            raise _Transient(detail_of(answer))
        if answer.status_code != 200:
            raise UserError(f"retriever at {self.url}: {detail_of(answer)}{_asked(answer, queries)}")
        content = answer.content
        charset = answer.charset_encoding
        if len(content) > _ON_THE_LOOP_BYTES:
            read = await asyncio.to_thread(read_answer, content, charset, len(queries))
        else:
            read = read_answer(content, charset, len(queries))
        self._count(read.left_out)
        self._answered = self._answered or read.fault is None
        return read


def _asked(answer: httpx.Response, queries: list[str]) -> str:
    """The query that a refusal may be about (a model wrote it): the first of those that went together."""
    if answer.status_code in _BARRED:
        return ""
    others = f" and {len(queries) - 1} more" if len(queries) > 1 else ""
    return f" (to the query {queries[0][:_SHOWN_CHARS]!r}{others})"


def clean_query(query: str) -> str:
    """A query that any server takes."""
    return query[:MAX_QUERY_CHARS].replace("\0", " ").encode("utf-8", "replace").decode()


def _check_token(token: str | None) -> None:
    """Never shows the token, only where it is wrong."""
    for place, character in enumerate(token or "", 1):
        if not " " <= character <= "~":
            raise UserError(
                f"retriever token: character {place} is U+{ord(character):04X}; printable ASCII is accepted, "
                "without a line break"
            )
    if token and token != token.strip():
        raise UserError(
            "retriever token: begins or ends with a space; printable ASCII without them is accepted"
        )


def _retry_after(answer: httpx.Response) -> float:
    value = answer.headers.get("retry-after", "")
    return min(float(value), _MOST_BACK_OFF_SECONDS) if value.isascii() and value.isdigit() else 0.0
