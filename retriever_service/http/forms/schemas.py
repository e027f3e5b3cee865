"""What goes over the wire: requests and answers of the REST interface, and the checks that a type can't
express."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, StrictStr, TypeAdapter, ValidationError
from pydantic.config import JsonDict

from retriever_service.errors import Limit, RequestRefused
from retriever_service.http.forms.leniency import Count, Flag, refused_limit
from services.common.printing.messages import said
from services.common.records import plain_name
from services.common.records.files import json_value

Query = Annotated[StrictStr, Field(examples=["who founded the First Bank of the United States?"])]


class Reply(NamedTuple):
    """An answer: its body, and what of the request was changed before it was carried out."""

    body: bytes
    changed: list[str]
    missing: str = ""
    """The shards that are missing in it, and why."""


T = TypeVar("T")
SLIP = 0.81
"""Likeness (difflib's ratio) from which on an unknown field is a slip of a known one: `query_id` beside
`query` is .77, and `top_p`, which clients pass on with their sampling parameters, beside `top_n` .80."""
OTHERS = {"return_source"}
"""Fields of other services that are nearer than that."""
_NUMBER: JsonDict = {"not": {"type": "null"}}
ONE_LIMIT: JsonDict = {
    "not": {
        "anyOf": [
            {"required": [one, other], "properties": {one: _NUMBER, other: _NUMBER}}
            for one, other in (("topk", "top_k"), ("topk", "top_n"), ("top_k", "top_n"))
        ]
    }
}
"""That the number of documents is given under one name, in the words of JSON Schema."""


def refuse_slips(given: Mapping[str, Any] | None, known: list[str]) -> None:
    """Raises RequestRefused for an unknown field that is a misspelt known one."""
    for field in (name for name in given or () if name not in OTHERS):
        # The same letters first: `topK` is `topk`, and not `top_k`, which is another form of the answer.
        same = [name for name in known if name == field.lower()]
        if near := same or get_close_matches(plain_name(field), known, n=1, cutoff=SLIP):
            accepted = ", ".join(known)
            what = f"unknown field; did you mean {near[0]}? Accepted are {accepted}"
            raise RequestRefused(422, f"{field}: {what}", field, accepted)


class Limited(BaseModel):
    """The number of documents, under any of its names. Other names for it are refused, and slips of known
    fields; other unknown fields are ignored."""

    model_config = ConfigDict(use_attribute_docstrings=True, extra="allow", json_schema_extra=ONE_LIMIT)

    topk: Count | None = None
    """Documents for each query; null or 0 is the server's default, and a number above the server's limit
    means that limit."""
    top_k: Count | None = None
    """As `topk`."""
    top_n: Count | None = None
    """As `topk`."""

    def limit(self) -> tuple[str, int | None]:
        """The name that was used and the number. Raises RequestRefused for several names, and for a name of
        another service or a misspelt field."""
        accepted = "topk, top_k or top_n"
        if unknown := refused_limit(self.model_extra):
            raise RequestRefused(
                422,
                f"{unknown}: no name for the number of documents here; expected {accepted}",
                unknown,
                accepted,
            )
        refuse_slips(self.model_extra, [*type(self).model_fields])
        given = {
            name: value for name in ("topk", "top_k", "top_n") if (value := getattr(self, name)) is not None
        }
        if len(given) > 1:
            names = " and ".join(given)
            raise RequestRefused(
                422, f"{names}: both given; expected one of {accepted}", next(iter(given)), accepted
            )
        return next(iter(given.items()), ("topk", None))


class RetrieveRequest(Limited):
    """`queries` (a list) or `query` (one string), never both. Unknown fields are ignored, as existing clients
    send some, but for slips of known ones."""

    model_config = ConfigDict(
        json_schema_extra={
            **ONE_LIMIT,
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
    return_scores: Flag = False
    """Wrap each document as `{"document": ..., "score": ...}`; with `top_k` true unless it is given."""
    return_fields: Literal["all"] | list[StrictStr] | None = None
    """Fields of the corpus that each document has besides id and contents: `all`, or their names. Null is
    `url`, where there is one."""


class _Scored(Limited):
    """FlashRAG's flags for scores. Fields are checked in this order, and the first error is the one told."""

    query: Query | list[Query]
    return_score: Flag = False
    """Answer with a list of documents and a list of their scores."""
    return_scores: Flag = False
    """As `return_score`."""

    def scores(self) -> bool:
        """Whether scores are asked for."""
        return self.return_score or self.return_scores


class SearchRequest(_Scored):
    """FlashRAG's request for one query. Without a limit it is 10."""

    query: Query
    """What to search for."""


class BatchSearchRequest(_Scored):
    """FlashRAG's request for several queries. Without a limit it is 10."""

    query: list[Query] = Field(fail_fast=True)
    """What to search for."""


class AccessRequest(BaseModel):
    """ASearcher's request for pages."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    urls: list[StrictStr] = Field(fail_fast=True)
    """Urls of passages as the corpus has them, or ids."""


class Document(BaseModel):
    """One passage of the corpus."""

    model_config = ConfigDict(use_attribute_docstrings=True, extra="allow")

    id: str
    contents: str
    """The title in quotes, a line break, then the text."""
    url: Any = None
    """Where the passage is from, if the corpus says so."""


class ScoredDocument(BaseModel):
    """A passage and its score; higher is better, and scores of different backends do not compare."""

    document: Document
    score: float


class RetrieveResponse(BaseModel):
    """One list for each query, in the order of the queries, best document first; shorter where fewer
    documents match."""

    result: list[list[ScoredDocument] | list[Document]]
    partial: bool = False
    """Whether shards are missing, which the header X-Unspiral-Partial names; only where the server was
    started with `--partial-answers`."""


class FlatResponse(RetrieveResponse):
    """What rLLM's client reads: the documents of its one query, besides the nested list. It is the answer
    where `top_k` was the limit's name."""

    query: str | None = None
    method: str
    """The index's backend."""
    results: list[ScoredDocument] | None = None
    num_results: int | None = None
    batch_size: int | None = None


class TextDocument(BaseModel):
    """What ZeroSearch's client reads; a server of `--dialect zerosearch`, or on port 6002, answers one
    `query` with a list of these."""

    text: str
    id: str
    score: float


class AccessResponse(BaseModel):
    """One row of the corpus for each url, with all its fields; null for what the corpus does not hold."""

    result: list[Document | None]


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
    rerank_topk: Count | None = None
    """Passages returned for each question; null or 0 is the server's default."""
    return_scores: Flag = False
    """Wrap each document as `{"document": ..., "score": ...}`."""


class ErrorBody(BaseModel):
    """Every error of this server: always all three fields."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    detail: str
    """What is wrong, in one line."""
    field: str | None
    """The field of the request that is wrong, e.g. `queries[3]`; null where it is none."""
    limit: int | float | str | None
    """What the field accepts; null where no field is wrong."""


_ACCEPTED = {
    "list_type": "a list",
    "string_type": "a string",
    "int_type": "an integer",
    "bool_type": "true or false",
    "model_type": "an object",
    "missing": "a value",
    "literal_error": "all, or a list of names",
}
"""What a field takes, for the errors whose own account of it is a name of the validation library."""


_SURROGATE = re.compile("[\ud800-\udfff]")


def field_path(location: tuple[int | str, ...]) -> str:
    """`("queries", 3)` as `queries[3]`."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location).lstrip(".")


def parse_body(adapter: TypeAdapter[T], body: bytes) -> T:
    """The request in `body`, or RequestRefused: 400 where it is not JSON, 422 where a field is wrong."""
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        first = _first(error)
        if first["type"] == "json_invalid":
            if any(word in first["ctx"]["error"] for word in ("surrogate", "hex escape")) and (
                field := _lone_surrogate(body)
            ):
                what = "holds a lone surrogate, which is not JSON in UTF-8"
                raise RequestRefused(400, f"{field}: {what}", field, "no lone surrogates") from None
            raise RequestRefused(
                400, f"the body is not JSON in UTF-8: {first['ctx']['error']}", "body", "JSON"
            ) from None
        field = field_path(first["loc"]) or "body"
        context = first.get("ctx") or {}
        bound = next((v for v in context.values() if isinstance(v, int | float | str)), first["type"])
        limit: Limit = _ACCEPTED.get(first["type"], bound)
        raise RequestRefused(422, f"{field}: {said(first['msg'])}", field, limit) from None


def _first(error: ValidationError) -> dict[str, Any]:
    """The first mistake. Where a field takes one of several forms, pydantic has one mistake for each, with
    the form in its place (`return_fields.literal['all']`): they become one, without that part."""
    errors: list[dict[str, Any]] = [dict(one) for one in error.errors(include_url=False, include_input=False)]
    first = errors[0]
    place: tuple[int | str, ...] = first["loc"]
    at = next((at for at, part in enumerate(place) if isinstance(part, str) and "[" in part), None)
    if at is None:
        return first
    forms = [one for one in errors if one["loc"][:at] == place[:at]]
    inside = next((one for one in forms if len(one["loc"]) > at + 1), None)
    if inside is not None:  # a form that the value has, with a part that does not fit
        return inside | {"loc": (*place[:at], *inside["loc"][at + 1 :])}
    first_said, *others = (one["msg"] for one in forms)
    said = " or ".join([first_said, *(one.removeprefix("Input should be ") for one in others)])
    return first | {"loc": place[:at], "msg": said}


def _lone_surrogate(body: bytes) -> str | None:
    """Path of the first string in `body` with a lone surrogate, `body` for a key; None where Python's parser,
    which lets them pass, finds none."""
    waiting: list[tuple[tuple[int | str, ...], Any]] = [((), json_value(body))]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str) and _SURROGATE.search(value):
            return field_path(path) or "body"
        if isinstance(value, dict) and any(map(_SURROGATE.search, value)):
            return "body"
        inside: list[tuple[int | str, Any]] = []
        if isinstance(value, dict):
            inside = [*value.items()]
        elif isinstance(value, list):
            inside = [*enumerate(value)]
        waiting += [((*path, key), one) for key, one in reversed(inside)]
    return None
