"""The part of OpenAI's chat interface that an agent speaks: its request, its error object, its models.

A field that would change the sampling is accepted with its neutral value alone, so that nobody takes an
answer for another than it is. Fields that are not named here have no effect.
"""

from __future__ import annotations

from contextlib import suppress
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from services.common.errors import UserError
from services.common.http.faults import FaultForm
from services.common.printing.messages import said
from services.common.validation import fitting

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def _whole(value: Any) -> Any:
    """JSON knows no difference between 5 and 5.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Positive = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
One = Annotated[int, Field(ge=1, le=1), BeforeValidator(_whole)]
Zero = Annotated[int, Field(ge=0, le=0), BeforeValidator(_whole)]


class Wire(BaseModel):
    """What clients send: fields that are not known are passed over."""

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)


class TextPart(Wire):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Wire):
    """One message of the conversation."""

    role: Literal[ROLES]  # type: ignore[valid-type]  # a tuple of strings, which mypy does not look into
    content: str | list[TextPart] | None = None

    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(Wire):
    """What a stream ends with."""

    include_usage: bool | None = None
    """End with a chunk that holds `usage`."""


class ResponseFormat(Wire):
    """The form of the answer."""

    type: Literal["text"]


_HAS_TEXT = {"type": "string", "pattern": r"\S"}
_QUESTION: dict[str, Any] = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"const": "user"},
        "content": {
            "anyOf": [
                _HAS_TEXT,
                {"type": "array", "contains": {"required": ["text"], "properties": {"text": _HAS_TEXT}}},
            ]
        },
    },
}
"""The JSON schema of a message that can be asked."""


class ChatRequest(Wire):
    """A question to the agent: the last message of role `user` with a text. The policy was trained on single
    questions, so earlier messages are not shown to it."""

    model: str
    """The name that /v1/models lists."""
    messages: list[Message] = Field(min_length=1, json_schema_extra={"contains": _QUESTION})
    stream: bool | None = None
    """Send the answer in events, as it is written."""
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    """0, which is the default here, is greedy."""
    max_tokens: Positive | None = None
    """Most tokens after the prompt, documents included. The run's own lengths hold besides."""
    max_completion_tokens: Positive | None = None
    """The same under its newer name."""
    logprobs: bool | None = None
    """Add the log-prob of each token that the model wrote."""
    top_logprobs: Zero | None = None
    """Only 0: the sampler keeps the log-prob of the token that it chose."""
    n: One | None = None
    """Only 1."""
    top_p: float | None = Field(None, ge=1, le=1)
    """Only 1, as in training."""
    presence_penalty: float | None = Field(None, ge=0, le=0)
    """Only 0."""
    frequency_penalty: float | None = Field(None, ge=0, le=0)
    """Only 0."""
    stop: list[str] | None = Field(None, max_length=0)
    """Only none: the template's own tags end an action."""
    logit_bias: dict[str, float] | None = Field(None, max_length=0)
    """Only none."""
    tools: list[Any] | None = Field(None, max_length=0)
    """Only none: the agent has its own tool, search."""
    functions: list[Any] | None = Field(None, max_length=0)
    """Only none."""
    response_format: ResponseFormat | None = None
    """Only text."""

    def question(self) -> str:
        """The last user's message with a text. Raises UserError (400)."""
        asked = (m.text().strip() for m in reversed(self.messages) if m.role == "user")
        text = next(filter(None, asked), None)
        if text is None:
            raise UserError("messages: expected one of role user, with a text", status=400, field="messages")
        return text

    def most_tokens(self) -> int | None:
        """The lesser of both limits."""
        return min((n for n in (self.max_tokens, self.max_completion_tokens) if n is not None), default=None)


UNION_TAGS = {"str", "list[TextPart]"}
"""Parts that pydantic adds to a place, for the member of a union that was tried."""


SLIP = 0.81
"""Least share of its letters in which a field is a slip of a known one. Other servers' fields that have no
effect here (`top_k`, `min_tokens`) share less with ours."""


def parse_request(body: bytes, served: str) -> ChatRequest:
    """A request from its body. served: the name of the model. Raises UserError (400), which names the first
    mistake and its field."""
    with suppress(ValueError):  # what is no JSON is refused below
        _refuse_slips(from_json(body))
    with fitting(lambda mistakes: _first_mistake(mistakes, served)):
        return ChatRequest.model_validate_json(body)


def _refuse_slips(given: Any) -> None:
    """Raises UserError for a field that is passed over, though it is a misspelt known one."""
    known = ChatRequest.model_fields
    for field in given if isinstance(given, dict) else ():
        if field not in known and (near := get_close_matches(field, known, n=1, cutoff=SLIP)):
            name = field[:60]
            raise UserError(f"{name}: unknown field; did you mean {near[0]}?", status=400, field=name)


def _first_mistake(mistakes: ValidationError, served: str) -> UserError:
    # Of a union's members the one that fits furthest says the most.
    first = max(mistakes.errors(), key=lambda error: len(error["loc"]))
    place = ".".join(str(part) for part in first["loc"] if part not in UNION_TAGS) or "body"
    if first["type"] == "missing":
        expected = f"; expected {served!r}, the one that is served" if place == "model" else ""
        return UserError(f"{place}: is missing{expected}", status=400, field=place)
    given = str(first.get("input"))[:60]
    return UserError(f"{place}: {said(first['msg'])} (got {given!r})", status=400, field=place)


class ErrorBody(BaseModel):
    """OpenAI's error."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    message: str
    """What is wrong, in one line."""
    type: str
    """`invalid_request_error`, `rate_limit_error` or `server_error`."""
    param: str | None
    """The field of the request that is wrong."""
    code: str | None
    """A word for programs; null where there is none."""


class ErrorObject(BaseModel):
    """Every error."""

    error: ErrorBody


_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


def error_object(detail: str, status: int, field: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error"
    if status == 429:
        kind = "rate_limit_error"
    elif status >= 500:
        kind = "server_error"
    code = _CODES.get(status) if status != 404 or field == "model" else None
    return {"error": {"message": detail, "type": kind, "param": field, "code": code}}


FORM = FaultForm(ErrorObject, error_object)


class Model(BaseModel):
    """A model that can be asked."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "unspiral"


class ModelList(BaseModel):
    """All of them: one."""

    object: Literal["list"] = "list"
    data: list[Model]
