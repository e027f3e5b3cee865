"""One client's connection: how large a request's head may be, how long head and body may take, and how many
connections are open.

uvicorn's parser (httptools) gathers a header line until it ends, at a cost that grows with its square, and
waits for ever for a client that says nothing. Here bytes and seconds are counted around it.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Literal

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

LINGER_SECONDS = 2.0
"""After a refusal, how long what the client still sends is read and dropped, so that it gets to read the
answer."""
LINGER_BYTES = 64 << 20
SPARE_BYTES = 1 << 20
"""Most of a body that is read and dropped after its request was answered."""
QUIET_SECONDS = 5.0
"""A body of which nothing came for so long makes room for a new connection."""
LEAST_DRAINED = 64 << 10
"""A client that has read less of an answer from one look to the next (`head_seconds`) is given up."""


@dataclass(frozen=True)
class Limits:
    """What one client, and all together, may ask of a server's connections."""

    head_bytes: int = 64 << 10
    """Longest head of a request (its first line and headers), and longest piece that says nothing; beyond it
    a 431."""
    head_seconds: float = 15.0
    """Longest time for a head, from the connection or from its first byte; after it a 408."""
    body_seconds: float = 60.0
    """Longest time for a body, before what `body_bytes_per_second` adds; after it a 408."""
    body_bytes_per_second: int = 256 << 10
    """Bytes of the body that add one second to its time when they arrive."""
    idle_seconds: float = 75.0
    """How long a connection stays open between requests."""
    connections: int = 1000
    """Most open connections. A further one replaces the one that has been quiet longest; where all are at
    work it gets a 503."""


class Config(uvicorn.Config):
    """uvicorn's configuration with the limits of its connections."""

    def __init__(self, app: Any, limits: Limits, **options: Any) -> None:
        self.limits = limits
        super().__init__(
            app,
            http=BoundedConnection,
            ws="none",
            timeout_keep_alive=limits.idle_seconds,  # type: ignore[arg-type]  # call_later takes fractions
            **options,
        )


Waiting = Literal["head", "body", "idle", "work", "end"]
"""A connection waits for a request's head or body, for the next request, for the service's answer, or, after
a refusal, for its own end."""


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's protocol within `Limits`."""

    def __init__(self, config: Config, *args: Any, **named: Any) -> None:
        super().__init__(config, *args, **named)
        self.limits = config.limits
        self.waits: Waiting = "head"
        self.since = self.heard = self.loop.time()
        self.unread = 0
        """Bytes since the parser last had a whole head or a piece of a body."""
        self.came = 0
        """As `unread`, plus the bytes that the parser is reading now."""
        self.taken = 0
        """Bytes of the body so far."""
        self.dropped = 0
        self.parsed = 0
        """Events of the parser."""
        self.undrained = 0
        self.look: asyncio.TimerHandle | None = None

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections and not self._has_room():
            detail = f"{self.limits.connections} connections are open and at work, the most that are accepted"
            self._refuse(503, detail, self.limits.connections)
            return
        self._look_in(self.limits.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.look is not None:
            self.look.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self.heard = self.loop.time()
        if self.waits == "end":
            self._drop(len(data), LINGER_BYTES)
            return
        if self.waits == "idle":
            self._wait_for("head")
        before = self.parsed
        self.came = self.unread + len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Answered as an ordinary request; whatever follows is not read as one.
            if self.cycle is not None:
                self.cycle.keep_alive = False
        except httptools.HttpParserError:
            self._refuse(400, "the request is not HTTP/1.1", "HTTP/1.1")
            return
        if self.waits == "end":  # refused in one of the parser's events
            return
        self.unread = self.unread + len(data) if self.parsed == before else 0
        if self.unread > self.limits.head_bytes:
            self._refuse_head()

    # ---- events of the parser

    def on_headers_complete(self) -> None:
        if self.waits == "end":
            return
        if self.came > self.limits.head_bytes and self._head_size() > self.limits.head_bytes:
            self._refuse_head()
            return
        if self.parser.should_upgrade() and self._has_body():  # the parser reads none of it
            self._refuse(
                400, "Upgrade with a body is not served; expected HTTP/1.1 without Upgrade", "HTTP/1.1"
            )
            return
        super().on_headers_complete()
        self.parsed += 1
        self.taken = self.dropped = 0
        self._wait_for("body")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self.waits != "end":
            self._wait_for("head")

    def on_body(self, body: bytes) -> None:
        if self.waits == "end":
            return
        super().on_body(body)
        self.parsed += 1
        self.taken += len(body)
        if self.cycle.response_complete:
            self._drop(len(body), SPARE_BYTES)

    def on_message_complete(self) -> None:
        if self.waits == "end":
            return
        super().on_message_complete()
        self.parsed += 1
        self._wait_for("idle" if self.cycle.response_complete else "work")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.waits == "work" and self.cycle.response_complete:
            self._wait_for("idle")

    # ---- limits

    def _wait_for(self, what: Waiting) -> None:
        self.waits = what
        self.since = self.heard

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _look_in(self, seconds: float) -> None:
        self.look = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """One timer for each connection, not one for each request: it comes back when the time of what is
        waited for is up."""
        if self.waits == "end":
            self.transport.close()
            return
        now = self.loop.time()
        if not self._is_read():
            self.transport.abort()
            return
        left = self.limits.head_seconds
        if self.waits == "head" and not (self.parsed and self._answering()):
            left = self.since + self.limits.head_seconds - now
        elif self.waits == "body" and not self.flow.read_paused:
            left = (
                self.since + self.limits.body_seconds + self.taken / self.limits.body_bytes_per_second - now
            )
        if left > 0:
            self._look_in(left)
        elif self.waits == "body" and not self.cycle.response_complete:
            self._refuse(
                408,
                f"body: it did not come whole within {self.limits.body_seconds:g} s",
                self.limits.body_seconds,
            )
        elif self.waits == "head" and self.unread:
            self._refuse(
                408,
                f"head: it did not come whole within {self.limits.head_seconds:g} s",
                self.limits.head_seconds,
            )
        else:  # a connection that nothing was asked on, as browsers open them in advance
            self.transport.close()

    def _is_read(self) -> bool:
        """Whether the client takes what is written to it."""
        size = self.transport.get_write_buffer_size()
        stuck = size and self.undrained and size > self.undrained - LEAST_DRAINED
        self.undrained = size
        return not stuck

    def _has_room(self) -> bool:
        """Whether there is a place for this connection, made by ending the one whose client has been quiet
        longest."""
        now = self.loop.time()
        ours = (c for c in self.connections if isinstance(c, BoundedConnection))
        open_ones = [c for c in ours if not c.transport.is_closing()]
        if len(open_ones) <= self.limits.connections:
            return True
        quiet = [c for c in open_ones if c is not self and c._can_be_ended(now)]
        if not quiet:
            return False
        min(quiet, key=lambda c: c.heard).transport.close()
        return True

    def _can_be_ended(self, now: float) -> bool:
        if self.waits == "body":
            return now - self.heard > QUIET_SECONDS and not self.flow.read_paused
        return self.waits == "idle" or (self.waits == "head" and not self._answering())

    def _drop(self, size: int, most: int) -> None:
        self.dropped += size
        if self.dropped > most:
            self.transport.close()

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _has_body(self) -> bool:
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
            for name, value in self.headers
        )

    def _refuse_head(self) -> None:
        self._refuse(
            431,
            f"head: more than the {self.limits.head_bytes} bytes that are accepted",
            self.limits.head_bytes,
        )

    def _refuse(self, status: int, detail: str, limit: float | str) -> None:
        """Answer in place of the application, and end the connection once the client has had time to read
        it."""
        if self._answering():
            if self.cycle.response_started or self.waits != "body":
                # Another answer is on its way: this one would be read as its part.
                self.transport.close()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = json.dumps({"detail": detail, "field": None, "limit": limit}).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
        if status == 503:
            head += b"retry-after: 1\r\n"
        self.transport.write(STATUS_LINE[status] + head + b"\r\n" + body)
        self.waits = "end"
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self.look is not None:
            self.look.cancel()
        self._look_in(LINGER_SECONDS)
