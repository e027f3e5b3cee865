"""Bodies of requests: read by the service itself, so that the size is bounded and a mistake is said in one line."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from services.common.http.errors import OneLineError


class TooLarge(OneLineError):
    """A body above the limit."""

    status = 413


async def read_body(request: Request, limit: int) -> bytes:
    """The body, read no further than the limit. Raises TooLarge."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise TooLarge(f"body of {declared} bytes; at most {limit} accepted")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise TooLarge(f"body of more than {limit} bytes; at most {limit} accepted")
        parts.append(part)
    return b"".join(parts)


def json_body(model: type) -> dict[str, Any]:
    """`openapi_extra` of a route that reads `model` from the body by itself."""
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": model.model_json_schema()}},
        }
    }
