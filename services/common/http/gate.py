"""The gate that every HTTP service stands behind: who may ask, under which name, and from which page.

1. A request that a foreign page sends from a user's browser is refused: posts across sites, and parts of its
   own page.
2. Without a token, a service answers only to names that no stranger can own (services.common.http.hosts),
   against DNS rebinding.
3. With a token, everything but the open paths needs it: as a bearer token, or, for reading in a browser, as
   the cookie that a
   login form sets. An event source sends no header, so the live page needs the cookie; it is same-site and
   hidden from scripts.

Everything is decided on the path that the server parsed (`scope["path"]`), which is what routes are chosen
by. A URL that a framework puts together holds the client's `Host` header.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

from starlette.requests import ClientDisconnect, Request, cookie_parser
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.http import pages
from services.common.http.auth import COOKIE, TOKEN_VARIABLE, cookie_of, is_bearer
from services.common.http.hosts import ALLOWED_VARIABLE, allowed_hosts, is_loopback, is_ours

HEALTH = frozenset({"/healthz", "/readyz", "/favicon.ico"})
"""Asked for no token by any service."""
MAX_FORM = 4096
COOKIE_SECONDS = 7 * 86400
LOOPBACK_NAMES = "localhost or a loopback address such as 127.0.0.1"
PRIVATE_NAMES = (
    "an address, a name of one label or one that ends as in private networks (.local, .internal, .svc)"
)
_READ = frozenset(
    {
        b"host",
        b"authorization",
        b"cookie",
        b"accept",
        b"origin",
        b"sec-fetch-site",
        b"sec-fetch-mode",
        b"sec-fetch-dest",
    }
)

Fault = Callable[[str, str | None, str | None], bytes]
"""JSON of a refusal, from its line, the part of the request that is wrong, and what is accepted there."""


def plain_fault(detail: str, field: str | None = None, limit: str | None = None) -> bytes:
    """`{"detail": ...}`."""
    return json.dumps({"detail": detail}).encode()


class Gate:
    """ASGI middleware.

    token: asked for by all paths but `open_paths`; None for none. login: serve the form at /login. fault:
    writes refusals.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        open_paths: frozenset[str] = HEALTH,
        login: bool = True,
        fault: Fault = plain_fault,
    ):
        self.app = app
        self.token = token
        self.fault = fault
        self.open_paths = open_paths
        self.login = login and token is not None
        self.cookie = cookie_of(token) if token else ""
        self.allowed = allowed_hosts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            answer = self._refusal(scope)
            if answer is None and self.login and self.token is not None and scope["path"] == "/login":
                answer = await self._login(self.token, Request(scope, receive))
            await (answer or self.app)(scope, receive, send)
        elif scope["type"] == "lifespan":  # no service has web sockets
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in _READ:
                if name == b"host" and name in headers:
                    return self._refuse(400, "more than one Host header", "host", "one Host header")
                headers[name] = value
        safe = scope["method"] in ("GET", "HEAD")
        if _foreign(headers, safe):
            return self._refuse(
                403, "requests from another site's page are refused", "origin", "this service's own pages"
            )
        if self.token is None:
            return self._refuse_stranger(scope, headers)
        path = scope["path"]
        if (
            path in self.open_paths
            or (self.login and path == "/login")
            or self._is_known(self.token, headers, safe)
        ):
            return None
        if self.login and safe and b"text/html" in headers.get(b"accept", b""):
            return RedirectResponse("/login", 303)
        detail = f"a token is needed: send Authorization: Bearer with the value of {TOKEN_VARIABLE}"
        if not self.login:
            detail = "a token is needed: send Authorization: Bearer TOKEN"
        return self._refuse(401, detail, "authorization", "Bearer TOKEN", {"WWW-Authenticate": "Bearer"})

    def _refuse_stranger(self, scope: Scope, headers: dict[bytes, bytes]) -> Response | None:
        server = (scope.get("server") or ("",))[0]
        host = headers.get(b"host", b"").decode("latin-1")
        if not host or is_ours(host, server, self.allowed):  # every browser sends a host
            return None
        accepted = LOOPBACK_NAMES if is_loopback(server) else PRIVATE_NAMES
        detail = (
            f"without a token, only requests whose Host is {accepted} are answered, and those in "
            f"{ALLOWED_VARIABLE}"
        )
        return self._refuse(403, detail, "host", accepted)

    def _is_known(self, token: str, headers: dict[bytes, bytes], safe: bool) -> bool:
        given = headers.get(b"authorization")
        if given is not None:
            return is_bearer(given, token)
        return self.login and safe and hmac.compare_digest(_cookie(headers).encode(), self.cookie.encode())

    def _refuse(
        self, status: int, detail: str, field: str, limit: str, headers: dict[str, str] | None = None
    ) -> Response:
        return Response(self.fault(detail, field, limit), status, headers, "application/json")

    async def _login(self, token: str, request: Request) -> Response:
        if request.method != "POST":
            return HTMLResponse(pages.LOGIN.replace("<!--message-->", ""))
        body = b""
        try:
            async for part in request.stream():
                body += part
                if len(body) > MAX_FORM:
                    detail = f"login form: at most {MAX_FORM} bytes accepted"
                    return self._refuse(413, detail, "body", str(MAX_FORM))
        except ClientDisconnect:
            return Response(status_code=499)
        given = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0]
        if not hmac.compare_digest(given.strip().encode(), token.encode()):
            refused = "<p role=alert>That is not the token.</p>"
            return HTMLResponse(pages.LOGIN.replace("<!--message-->", refused), 401)
        answer = RedirectResponse("/", 303)
        secure = request.scope["scheme"] == "https"
        answer.set_cookie(
            COOKIE, self.cookie, max_age=COOKIE_SECONDS, httponly=True, samesite="strict", secure=secure
        )
        return answer


def _foreign(headers: dict[bytes, bytes], safe: bool) -> bool:
    """Whether a page of another site makes the request. A link that a person follows is no such request."""
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        if safe:
            followed = (
                headers.get(b"sec-fetch-mode") == b"navigate"
                and headers.get(b"sec-fetch-dest") == b"document"
            )
            return site == b"cross-site" and not followed
        return site not in (b"none", b"same-origin")
    origin = headers.get(b"origin")  # what browsers say to an address that is neither loopback nor encrypted
    return (
        origin is not None
        and not safe
        and _place(origin) != headers.get(b"host", b"").decode("latin-1").lower()
    )


def _place(origin: bytes) -> str:
    """HOST:PORT of an origin, as the `Host` header has it; empty for `null` and what is no origin."""
    try:
        return urlsplit(origin.decode("latin-1").lower()).netloc
    except ValueError:
        return ""


def _cookie(headers: dict[bytes, bytes]) -> str:
    """The value of our own cookie. Others on this host, which may be set by anyone, are read as browsers read
    them."""
    return cookie_parser(headers.get(b"cookie", b"").decode("latin-1")).get(COOKIE, "")
