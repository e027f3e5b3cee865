"""What goes over the wire: requests and answers of the REST interface, and the checks that a type can't express."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)

Query = Annotated[StrictStr, Field(examples=["who founded the First Bank of the United States?"])]


class RetrieveRequest(BaseModel):
    """`queries` (a list) or `query` (one string), never both. Unknown fields are ignored, as existing clients send some."""

    model_config = ConfigDict(
        use_attribute_docstrings=True,
        json_schema_extra={
            "oneOf": [
                {"required": ["queries"], "properties": {"queries": {"type": "array"}}},
                {"required": ["query"], "properties": {"query": {"type": "string"}}},
            ],
            "examples": [
                {
                    "queries": ["who founded the First Bank of the United States?"],
                    "topk": 3,
                    "return_scores": True,
                },
                {"query": "capital of Assyria", "topk": 1, "return_scores": True},
            ],
        },
    )

    queries: list[Query] | None = Field(None, fail_fast=True)
    """Questions to search for. An empty list gets an empty answer."""
    query: Query | None = None
    """One question; the answer still nests twice."""
    topk: StrictInt | None = Field(None, ge=0)
    """Documents for each query; null or 0 is the server's default."""
    return_scores: StrictBool = False
    """Wrap each document as `{"document": ..., "score": ...}`."""


class Document(BaseModel):
    """One passage of the corpus."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    contents: str
    """The title in quotes, a line break, then the text."""


class ScoredDocument(BaseModel):
    """A passage and its score; higher is better, and scores of different backends do not compare."""

    document: Document
    score: float


class RetrieveResponse(BaseModel):
    """One list for each query, in the order of the queries, best document first; shorter where fewer documents match."""

    result: list[list[ScoredDocument] | list[Document]]


class GivenContents(BaseModel):
    """The inside of a wrapped passage: Search-R1 reads its contents alone."""

    id: StrictStr | None = None
    contents: StrictStr


class GivenDocument(BaseModel):
    """A passage as `/retrieve` returns it, with its score or without; unknown fields are ignored."""

    id: StrictStr | None = None
    contents: StrictStr | None = None
    document: GivenContents | None = None

    def plain(self) -> tuple[str, str] | None:
        """Id (empty where none was given) and contents, or None where there are no contents."""
        given = self.document or self
        return None if given.contents is None else (given.id or "", given.contents)


class RerankRequest(BaseModel):
    """List i of `documents` belongs to query i."""

    model_config = ConfigDict(
        use_attribute_docstrings=True,
        json_schema_extra={
            "examples": [
                {
                    "queries": ["capital of Assyria"],
                    "documents": [
                        [{"id": "7", "contents": '"Nineveh"\nNineveh was the capital of Assyria.'}]
                    ],
                    "rerank_topk": 3,
                    "return_scores": True,
                }
            ]
        },
    )

    queries: list[Query] = Field(fail_fast=True)
    """Questions."""
    documents: list[Annotated[list[GivenDocument], FailFast()]] = Field(fail_fast=True)
    """For each question the passages to order."""
    rerank_topk: StrictInt | None = Field(None, ge=0)
    """Passages returned for each question; null or 0 is the server's default."""
    return_scores: StrictBool = False
    """Wrap each document as `{"document": ..., "score": ...}`."""


class ErrorBody(BaseModel):
    """Every error of this server: always all three fields."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    detail: str
    """What is wrong, in one line."""
    field: str | None
    """The field of the request that is wrong, e.g. `queries[3]`; null where it is none."""
    limit: int | float | str | None
    """What is accepted there; null where no field is wrong."""


class BadRequest(Exception):
    """A request that can't be served: an HTTP status, and the fields of ErrorBody."""

    def __init__(
        self, status: int, detail: str, field: str | None = None, limit: int | float | str | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.body = {"detail": detail, "field": field, "limit": limit}


_ACCEPTED = {
    "list_type": "a list",
    "string_type": "a string",
    "int_type": "an integer",
    "bool_type": "true or false",
    "model_type": "an object",
    "missing": "a value",
}
"""What a field takes, for the errors whose own account of it is a name of the validation library."""


_SURROGATE = re.compile("[\ud800-\udfff]")


def field_path(location: tuple[int | str, ...]) -> str:
    """`("queries", 3)` as `queries[3]`."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location).lstrip(".")


def parse_body(adapter: TypeAdapter, body: bytes) -> Any:
    """The request in `body`, or BadRequest: 400 where it is not JSON, 422 where a field is wrong."""
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            if any(word in first["ctx"]["error"] for word in ("surrogate", "hex escape")) and (
                field := _lone_surrogate(body)
            ):
                limit = "no lone surrogates"
                raise BadRequest(
                    400, f"{field}: holds a lone surrogate, which is not JSON in UTF-8", field, limit
                ) from None
            raise BadRequest(
                400, f"the body is not JSON in UTF-8: {first['ctx']['error']}", "body", "JSON"
            ) from None
        field = field_path(first["loc"]) or "body"
        context = first.get("ctx") or {}
        limit = _ACCEPTED.get(first["type"])
        if limit is None:
            limit = next((v for v in context.values() if isinstance(v, int | float | str)), first["type"])
        raise BadRequest(422, f"{field}: {first['msg']}", field, limit) from None


def _lone_surrogate(body: bytes) -> str | None:
    """Path of the first string in `body` with a lone surrogate, `body` for a key; None where Python's parser, which lets them pass,
    finds none."""
    try:
        waiting = [((), json.loads(body))]
    except (ValueError, RecursionError):
        return None
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str) and _SURROGATE.search(value):
            return field_path(path) or "body"
        if isinstance(value, dict) and any(map(_SURROGATE.search, value)):
            return "body"
        inside = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        waiting += reversed([((*path, key), one) for key, one in inside])
    return None


def check_texts(texts: list[str], field: str, max_count: int, max_chars: int) -> None:
    """Refuse too many texts, and what `check_text` refuses."""
    if len(texts) > max_count:
        raise BadRequest(
            422, f"{field}: {len(texts)} given, at most {max_count} are accepted", field, max_count
        )
    for i, text in enumerate(texts):
        if len(text) > max_chars or "\0" in text:  # the name of a field is made for a wrong one alone
            check_text(text, f"{field}[{i}]", max_chars)


def check_text(text: str, field: str, max_chars: int) -> None:
    """Refuse a text that is too long, and NUL characters (no text has them, and they break tokenizers in C)."""
    if len(text) > max_chars:
        raise BadRequest(
            422, f"{field}: {len(text)} characters, at most {max_chars} are accepted", field, max_chars
        )
    if "\0" in text:
        raise BadRequest(422, f"{field}: holds a NUL character", field, "no NUL characters")


def check_topk(topk: int | None, default: int, maximum: int, field: str = "topk") -> int:
    """The number of documents meant: null and 0 are the default."""
    if not topk:
        return min(default, maximum)
    if topk > maximum:
        raise BadRequest(422, f"{field}: {topk}, at most {maximum} is accepted", field, maximum)
    return topk
