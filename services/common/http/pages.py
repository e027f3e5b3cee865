"""Pages that every service has, and the policy that they are served under."""

from __future__ import annotations

from pathlib import Path

from fastapi.responses import HTMLResponse

STATIC = Path(__file__).parent / "static"
LOGIN = (STATIC / "login.html").read_text(encoding="utf-8")
"""The form of the token gate; `<!--message-->` is where a refusal is said."""
DOCS = (STATIC / "docs.html").read_text(encoding="utf-8")
CONTENT_POLICY = "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src data:; connect-src 'self'"


def docs_page(title: str, heading: str) -> HTMLResponse:
    """The routes of the service that answers, read from its /openapi.json."""
    page = DOCS.replace("<!--title-->", title).replace("<!--heading-->", heading)
    return HTMLResponse(page, headers={"Content-Security-Policy": CONTENT_POLICY})
