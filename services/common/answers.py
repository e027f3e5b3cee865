"""JSON that another program wrote: a server behind an ingress, somebody else's retriever, an older version of
a service."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import orjson

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def read_json(body: bytes, charset: str | None = None) -> Any:
    """A JSON body, read as leniently as Python reads it: NaN, lone surrogates and bytes outside the encoding
    are no reason to refuse it.

    charset: the encoding that the sender names; otherwise the one that JSON's first bytes show. Raises
    ValueError in one line.
    """
    if not charset or charset.lower() in ("utf-8", "utf8"):
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError:
            charset = None
    try:
        return json.loads(_decoded(body, charset))
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({error}): {shown(body)}") from None


def object_of(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; empty where it is none."""
    try:
        found = read_json(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _decoded(body: bytes, charset: str | None) -> str:
    if charset:
        with suppress(LookupError, UnicodeError):  # no such encoding, or none of text
            return body.decode(charset, "replace")
    return body.decode(json.detect_encoding(body), "replace")


def clean_text(text: str) -> str:
    """Text that every tokenizer and file takes: lone surrogates become U+FFFD, and NUL characters spaces."""
    if text.isascii() and "\0" not in text:
        return text
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return joined.replace("\0", " ")


def shown(body: bytes, most: int = 80) -> str:
    """The beginning of a body, on one line, for a message."""
    text = " ".join(body[: 4 * most].decode("utf-8", "replace").split())
    printable = "".join(c if c.isprintable() else _REPLACEMENT for c in text)
    return repr(printable[:most] + ("..." if len(printable) > most else ""))
