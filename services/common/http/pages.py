"""Pages that every service has, served from the package, and the policy that they are served under."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

STATIC = Path(__file__).parent / "static"
LOGIN = (STATIC / "login.html").read_text(encoding="utf-8")
"""The form of the gate; `<!--message-->` is where a refusal is said."""
DOCS = (STATIC / "docs.html").read_text(encoding="utf-8")
ICON = (STATIC / "favicon.svg").read_bytes()
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'"
)


def add_pages(app: FastAPI, title: str, heading: str) -> None:
    """Add /docs, which shows the application's own /openapi.json, and /favicon.ico."""
    page = DOCS.replace("<!--title-->", title).replace("<!--heading-->", heading)

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": CONTENT_POLICY})

    @app.get("/favicon.ico", response_class=Response, include_in_schema=False)
    async def favicon() -> Response:
        return Response(ICON, media_type="image/svg+xml", headers={"Cache-Control": "max-age=86400"})
