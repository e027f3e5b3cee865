"""In one line: why a server of passages gave no answer, or which one it gave instead."""

from __future__ import annotations

import httpx

from services.common.answers import object_of


def reason_of(error: Exception) -> str:
    """What went wrong with a request."""
    return " ".join(str(error).split()) or type(error).__name__


def detail_of(answer: httpx.Response) -> str:
    """Status and reason of an answer that is none, or where it sends on to."""
    if answer.has_redirect_location:
        return f"{answer.status_code} sends on to {answer.headers['location'][:200]}, which is not followed"
    detail = str(object_of(answer.content).get("detail", answer.text[:1000]))
    return f"{answer.status_code} {' '.join(detail.split())[:200]}".rstrip()
