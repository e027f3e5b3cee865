"""A configuration with mistakes, as far as it can be judged all the same."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from services.common.errors import UserError
from trainer.config.schema import UNION_TAGS, Config, override, parse_config
from trainer.config.yaml_file import Written, read_sections

ROUNDS = 4
"""A section without its wrong keys may have another mistake."""


def load_what_fits(path: str | Path, overrides: Iterable[str] = ()) -> tuple[Config, list[str]]:
    """As `load_config`, without the keys that are wrong, and the line of each. Raises UserError where the
    rest is no configuration: a key is missing, or keys do not go together."""
    overrides = [*overrides]
    raw = read_sections(Path(path))
    override(raw, overrides)
    try:
        return parse_config(copy.deepcopy(raw), Written(Path(path), overrides)), []
    except UserError as error:
        first = found = error
    for _ in range(ROUNDS):
        if not _without_wrong(raw, found.__cause__):
            break
        try:
            return parse_config(copy.deepcopy(raw)), str(first).split("\n")
        except UserError as error:
            found = error
    raise first


def _without_wrong(raw: dict[str, Any], cause: BaseException | None) -> bool:
    """Take the wrong keys out; whether there were some, and each was there."""
    if not isinstance(cause, ValidationError):
        return False
    places = {tuple(part for part in one["loc"] if part not in UNION_TAGS) for one in cause.errors()}
    # Of a list the last one first, so that the places of the others stay.
    return bool(places) and all([_take_out(raw, place) for place in sorted(places, key=_order, reverse=True)])


def _order(place: tuple[Any, ...]) -> list[str]:
    """Place 10 of a list stands behind place 9."""
    return [f"{part:09}" if isinstance(part, int) else str(part) for part in place]


def _take_out(raw: dict[str, Any], place: tuple[Any, ...]) -> bool:
    node: Any = raw
    try:
        for part in place[:-1]:
            node = node[part]
        del node[place[-1]]
    except (KeyError, IndexError, TypeError):
        return False
    return True
