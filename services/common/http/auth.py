"""Who may read and write: a bearer token for programs, a same-site cookie for the live page, health for everybody.

An event source of a browser sends no header, so the page logs in by a form and gets a cookie. The cookie is derived from the
token (it does not hold it), is not readable by scripts, and opens reading alone.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from urllib.parse import parse_qs, urlsplit

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.http import pages
from services.common.http.errors import OneLineError

TOKEN_VARIABLE = "UNSPIRAL_API_TOKEN"
COOKIE = "unspiral_likelihood"
OPEN_PATHS = {"/healthz", "/readyz", "/login"}
LOOPBACK = {"127.0.0.1", "::1", "localhost"}
MAX_FORM = 4096


REBOUND = f"without {TOKEN_VARIABLE}, only requests whose Host is localhost or a loopback address such as 127.0.0.1 are answered"


class TokenRequired(OneLineError):
    """The service is to be bound beyond this machine, and no token is set."""


def required_token(host: str, token: str | None = None) -> str | None:
    """The token to ask for: the one given, or UNSPIRAL_API_TOKEN. Raises TokenRequired for a wider host without one."""
    token = token or os.environ.get(TOKEN_VARIABLE) or None
    if token is None and host not in LOOPBACK:
        raise TokenRequired(
            f"host {host}: reachable from other machines, so set {TOKEN_VARIABLE}, or bind to 127.0.0.1"
        )
    return token


class TokenGate:
    """ASGI middleware. Without a token it only refuses what a foreign web page sends from this machine's browser: by a post across sites, or
    under a host name of its own that it has made to mean 127.0.0.1 (DNS rebinding)."""

    def __init__(self, app: ASGIApp, token: str | None):
        self.app, self.token = app, token
        self.cookie = (
            hmac.new(token.encode(), b"unspiral likelihood page", hashlib.sha256).hexdigest() if token else ""
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        answer = await self._answer(request)
        await (answer or self.app)(scope, receive, send)

    async def _answer(self, request: Request) -> Response | None:
        safe = request.method in ("GET", "HEAD")
        if not safe and request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return JSONResponse({"detail": "posts from another site's page are refused"}, 403)
        if self.token is None:
            return None if _meant_for_here(request) else JSONResponse({"detail": REBOUND}, 403)
        if request.url.path == "/login":
            return await self._login(request)
        if request.url.path in OPEN_PATHS or self._known(request, safe):
            return None
        if safe and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/login", 303)
        return JSONResponse(
            {"detail": f"a token is needed: send Authorization: Bearer with the value of {TOKEN_VARIABLE}"},
            401,
            {"WWW-Authenticate": "Bearer"},
        )

    def _known(self, request: Request, safe: bool) -> bool:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return hmac.compare_digest(given.strip().encode(), self.token.encode())
        return safe and hmac.compare_digest(request.cookies.get(COOKIE, "").encode(), self.cookie.encode())

    async def _login(self, request: Request) -> Response:
        if request.method != "POST":
            return HTMLResponse(pages.LOGIN.replace("<!--message-->", ""))
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_FORM:
                return JSONResponse({"detail": f"login form: at most {MAX_FORM} bytes accepted"}, 413)
        given = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0]
        if not hmac.compare_digest(given.strip().encode(), self.token.encode()):
            return HTMLResponse(
                pages.LOGIN.replace("<!--message-->", "<p role=alert>That is not the token.</p>"), 401
            )
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            COOKIE,
            self.cookie,
            max_age=7 * 86400,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer


def _meant_for_here(request: Request) -> bool:
    """Whether a request that came by the loopback interface names it as its host too."""
    server = (request.scope.get("server") or ("",))[0]
    host = request.headers.get("host", "")
    if not _loopback(server) or not host:  # every browser sends a host
        return True
    try:
        return _loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def _loopback(host: str) -> bool:
    try:
        return host in LOOPBACK or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
