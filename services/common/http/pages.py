"""Pages that every service has, served from the package, and the policy that they are served under."""

from __future__ import annotations

import html
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException

STATIC = Path(__file__).parent / "static"
STYLE = f"<style>\n{(STATIC / 'shell.css').read_text(encoding='utf-8')}</style>"
SCRIPT = f"<script data-alone>\n{(STATIC / 'shell.js').read_text(encoding='utf-8')}</script>"
SERVICE = f"<script>\n{(STATIC / 'service.js').read_text(encoding='utf-8')}</script>"


def shelled(page: Path) -> str:
    """A page of one file, with the look and the theme that all pages share written into it. It has
    `<!--shell-->` before its own styles, `<!--theme-->` at its end, and a button `theme`; with
    `<!--service-->` before its own scripts it can tell whether the service is ready."""
    text = page.read_text(encoding="utf-8")
    for mark, part in (("<!--shell-->", STYLE), ("<!--theme-->", SCRIPT), ("<!--service-->", SERVICE)):
        text = text.replace(mark, part)
    return text


LOGIN = shelled(STATIC / "login.html")
"""The form of the gate; `<!--message-->` is where a refusal is said."""
DOCS = shelled(STATIC / "docs.html")
MISSING = shelled(STATIC / "missing.html")
ICON = (STATIC / "favicon.svg").read_bytes()
WAY = '<a href="./">← the page of the service</a>'
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'"
)


def no_such_page(request: Request, error: HTTPException) -> HTMLResponse | None:
    """What a browser shows at an address that no route has: the ways to those that there are. None of
    another error, and for whoever reads no pages."""
    reads = request.method == "GET" and "text/html" in request.headers.get("accept", "")
    if not reads or (error.status_code, error.detail) != (404, "Not Found"):  # Starlette's own words
        return None
    has_page = _has_page(request.app)
    known = "The page of the service leads to what there is." if has_page else "The API lists what there is."
    way = '<a href="/">← the page of the service</a>' if has_page else ""
    text = MISSING.replace("<!--way-->", way).replace("<!--list-->", known)
    text = text.replace("<!--path-->", html.escape(request.scope["path"][:300]))
    return HTMLResponse(text, 404, {"Content-Security-Policy": CONTENT_POLICY})


def _has_page(app: FastAPI) -> bool:
    return any(getattr(route, "path", None) == "/" for route in app.routes)


def add_pages(app: FastAPI, title: str, heading: str) -> None:
    """Add /docs, which shows the application's own /openapi.json, and /favicon.ico."""
    page = DOCS.replace("<!--title-->", title).replace("<!--heading-->", heading)

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> HTMLResponse:
        text = page.replace("<!--way-->", WAY if _has_page(app) else "")
        return HTMLResponse(text, headers={"Content-Security-Policy": CONTENT_POLICY})

    @app.get("/favicon.ico", response_class=Response, include_in_schema=False)
    async def favicon() -> Response:
        return Response(ICON, media_type="image/svg+xml", headers={"Cache-Control": "max-age=86400"})
