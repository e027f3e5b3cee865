"""What schemathesis is told that no JSON schema says: a body of bytes that is accepted, and integers inside
free data."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import schemathesis
from hypothesis import strategies as st
from schemathesis import openapi

from services.contracts import TokenBatch
from services.likelihood.wire.tokens import pack_tokens

TOKENS = TokenBatch(
    ["a", "b"],
    np.array([0, 2, 3]),
    np.arange(3, dtype=np.int32),
    np.array([-1, 0, 0], np.int16),
    logp_old=np.array([0, -1, -2], np.float32),
)
openapi.media_type("application/octet-stream", st.just(pack_tokens(TOKENS)))


@schemathesis.hook
def filter_body(context: Any, body: Any) -> bool:
    """Leave out what gets a 422 for a reason that no JSON schema can say: free data with integers beyond 64
    bits, segments whose lists are not as long as their tokens, and names of fields that no passage has."""
    wide: list[str] = []

    def integer(text: str) -> int:
        if len(text) > 18:
            wide.append(text)
        return 0

    if isinstance(body, dict) and "data" in body:
        json.loads(json.dumps(body["data"], default=str), parse_int=integer)
    named = body.get("return_fields") if isinstance(body, dict) else None
    if isinstance(named, list) and not {"id", "contents"}.issuperset(map(str, named)):
        return False
    return not wide and all(map(_of_one_length, _segments(body)))


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """The same for cases that are not drawn by Hypothesis."""
    return filter_body(context, case.body)


def _segments(body: Any) -> list[dict[str, Any]]:
    trajectories = body.get("trajectories") if isinstance(body, dict) else None
    of_each = [t.get("segments") for t in trajectories or [] if isinstance(t, dict)]
    return [s for segments in of_each if isinstance(segments, list) for s in segments if isinstance(s, dict)]


def _of_one_length(segment: dict[str, Any]) -> bool:
    tokens = segment.get("tokens")
    if not isinstance(tokens, list):
        return True
    values = [segment.get(name) for name in ("logp_before", "logp_after", "logp_sampler")]
    held = segment.get("held")
    indexes = [i for i in held if isinstance(i, int)] if isinstance(held, list) else []
    return all(len(v) == len(tokens) for v in values if isinstance(v, list)) and all(
        i < len(tokens) for i in indexes
    )
