"""The keys of the configuration in words, as `unspiral config explain` prints them."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from services.common.errors import UserError
from services.common.names import accepted, nearest
from trainer.config.aliases import keys_like, keys_with
from trainer.config.schema import Config, paths_of, section_of

WIDTH = 88


def explain(path: str | None = None) -> str:
    """A key, or a section's keys, each with its default and meaning; without a path the sections. Raises
    UserError for a path that leads nowhere."""
    if path is None:
        lines = ["Sections; `unspiral config explain SECTION` has their keys.", ""]
        for name, field in Config.model_fields.items():
            section = section_of(field.annotation)
            lines += _entry(name, section.__doc__ if section else field.description, indent=14)
        return "\n".join(lines)
    model: type[BaseModel] = Config
    *sections, last = path.split(".")
    for i, name in enumerate([*sections, last]):
        field = _field(model, name, path)
        section = section_of(field.annotation)
        if section is None:
            if i < len(sections):
                raise UserError(f"config explain {path}: {'.'.join(path.split('.')[: i + 1])} holds no keys")
            return "\n".join(_key(path, field))
        model = section
    return "\n".join(_section(path, model))


def _section(path: str, model: type[BaseModel]) -> Iterator[str]:
    yield from textwrap.wrap(f"{path}: {_words(model.__doc__)}", WIDTH)
    for name, field in model.model_fields.items():
        key = f"{path}.{field.alias or name}"
        yield ""
        if section := section_of(field.annotation):
            yield from textwrap.wrap(f"{key}: a section. {_words(section.__doc__)}", WIDTH)
        else:
            yield from _key(key, field)


def _key(key: str, field: FieldInfo) -> list[str]:
    text = textwrap.wrap(_words(field.description), WIDTH - 4)
    text += textwrap.wrap(_accepted(field), WIDTH - 4)
    return [f"{key} (default: {_default(field)})", *(f"    {line}" for line in text)]


def _accepted(field: FieldInfo) -> str:
    """`Accepted: action, response, token.`, `Accepted: above 0.` or `Accepted: auto, a number.`; "" of a key
    that takes any value of its kind."""
    kinds = [field.annotation, *get_args(field.annotation)]
    words = list(dict.fromkeys(word for kind in kinds for word in _words_of(kind)))
    limits = _limits(one for of in (field.metadata, *map(_constraints, kinds)) for one in of)
    if words and any(_plain(kind) in (int, float) for kind in kinds):
        return f"Accepted: {', '.join(words)}, a number{f' {limits}' if limits else ''}."
    said = ", ".join([*words, *([limits] if limits else [])])
    return f"Accepted: {said}." if said else ""


def _words_of(kind: Any) -> list[str]:
    """Those that a Literal takes."""
    if get_origin(kind) is not Literal:
        return []
    return [value if isinstance(value, str) else json.dumps(value) for value in get_args(kind)]


def _plain(kind: Any) -> Any:
    """The type without its constraints."""
    return get_args(kind)[0] if _constraints(kind) else kind


def _constraints(kind: Any) -> tuple[Any, ...]:
    """Of an Annotated type."""
    return getattr(kind, "__metadata__", ())


def _limits(constraints: Iterable[Any]) -> str:
    """`above 0`, `0 to 1`: of a number."""
    names = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    found = [one for constraint in constraints for one in (constraint, *getattr(constraint, "metadata", ()))]
    bounds = {name: getattr(one, name) for one in found for name in names if hasattr(one, name)}
    if {"ge", "le"} <= bounds.keys():
        return f"{bounds['ge']:g} to {bounds['le']:g}"
    return " and ".join(f"{word} {bounds[name]:g}" for name, word in names.items() if name in bounds)


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined and field.default_factory is None:
        return "none; must be given"
    return json.dumps(to_jsonable_python(field.get_default(call_default_factory=True)))


def _entry(name: str, text: str | None, indent: int) -> list[str]:
    first, *rest = textwrap.wrap(_words(text), WIDTH - indent) or [""]
    return [f"{name:<{indent}}{first}", *(" " * indent + line for line in rest)]


def _words(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").strip()


def _field(model: type[BaseModel], name: str, path: str) -> FieldInfo:
    fields: dict[str, Any] = {field.alias or n: field for n, field in model.model_fields.items()}
    if name not in fields:
        raise UserError(f"config explain {path}: no key {name}; {_meant(name, path, list(fields))}")
    found: FieldInfo = fields[name]
    return found


def _meant(name: str, path: str, known: list[str]) -> str:
    """What the path may mean whose part `name` is unknown. known: the names that may stand there."""
    keys = list(paths_of(Config))
    there = nearest(name, known)
    if path.endswith(f".{name}") and there and not keys_with(name, keys):
        return accepted(name, known)
    found = keys_like(path, keys) or ([] if there else keys_like(name, keys))
    return f"did you mean {' or '.join(found)}?" if found else accepted(name, known)
