"""Reading the file of a configuration: what is wrong with it is one line, with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.common.names import near_path
from services.common.printing.kinds import kind_of
from services.common.runs.paths import CONFIG
from services.common.users_files import parse_yaml, why_unread


def read_sections(path: Path) -> dict[str, Any]:
    """The sections of a YAML file. Raises UserError."""
    try:
        raw = parse_yaml(path.read_text(encoding="utf-8"))
    except IsADirectoryError as e:
        own = path / CONFIG
        hint = f"; {own} is one" if own.is_file() else ""
        raise UserError(f"{path}: is a folder; expected a YAML file{hint}") from e
    except (OSError, UnicodeDecodeError) as e:
        near = near_path(path, lambda file: file.suffix in (".yaml", ".yml"))
        raise UserError(f"{path}: cannot be read ({why_unread(e)}){near}") from e
    except ValueError as e:
        raise UserError(f"{path}{_place_and_problem(e)}") from e
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected sections (run, model, data, ...), got {kind_of(raw)}")
    return raw


def refuse_missing_space(raw: dict[str, Any], at: str = "") -> None:
    """YAML takes `{count:lamp}` for a key `count:lamp` without a value. Raises UserError that says so."""
    for key, value in raw.items():
        name, colon, rest = str(key).partition(":")
        if value is None and colon and rest:
            where = f"{at}: " if at else ""
            raise UserError(f"{where}{key}: a space is missing after the colon; expected {{{name}: {rest}}}")
        if isinstance(value, dict):
            refuse_missing_space(value, f"{at}.{key}".lstrip("."))


def _place_and_problem(error: ValueError) -> str:
    """What follows the file's name, of an error of `parse_yaml`."""
    place, colon, words = str(error).partition(": ")
    is_place = colon and place.startswith("line ")
    return f", {place}: not YAML: {words}" if is_place else f": not YAML: {error}"
