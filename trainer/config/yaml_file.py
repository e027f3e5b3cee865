"""Reading the file of a configuration: what is wrong with it is one line, with its place."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.common.names import near_path
from services.common.printing.kinds import kind_of
from services.common.runs.paths import CONFIG
from services.common.users_files import line_of, parse_yaml, why_unread


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


class Written:
    """Where the keys of a configuration stand: in its file, unless the command line gave them."""

    def __init__(self, file: Path, overrides: Iterable[str]) -> None:
        self._file = file
        self._given = [item.partition("=")[0] for item in overrides]

    def before(self, key: tuple[Any, ...], words: str = "") -> str:
        """`FILE, line N: `, which stands before what is said about a key; empty for one that the command line
        gave. key: its names, none of what is about several; words: what is said about these."""
        dotted = ".".join(map(str, key))
        for given in self._given:
            same = dotted and f"{dotted}.".startswith(f"{given}.")
            below = dotted and given.startswith(f"{dotted}.")  # the mistake may be of what was given
            if same or below or given in words:
                return ""
        line = self._line(key)
        return f"{self._file}, line {line}: " if line else f"{self._file}: "

    def _line(self, key: tuple[Any, ...]) -> int | None:
        if not self._file.is_file():  # a pipe has been read
            return None
        try:
            return line_of(self._file.read_text(encoding="utf-8"), key)
        except (OSError, ValueError):
            return None


def refuse_missing_space(raw: dict[str, Any], written: Written | None = None, at: str = "") -> None:
    """YAML takes `{count:lamp}` for a key `count:lamp` without a value. Raises UserError that says so."""
    for key, value in raw.items():
        name, colon, rest = str(key).partition(":")
        if value is None and colon and rest:
            where = written.before((*filter(None, at.split(".")), key)) if written else ""
            where += f"{at}: " if at else ""
            raise UserError(f"{where}{key}: a space is missing after the colon; expected {{{name}: {rest}}}")
        if isinstance(value, dict):
            refuse_missing_space(value, written, f"{at}.{key}".lstrip("."))


def _place_and_problem(error: ValueError) -> str:
    """What follows the file's name, of an error of `parse_yaml`."""
    place, colon, words = str(error).partition(": ")
    is_place = colon and place.startswith("line ")
    return f", {place}: not YAML: {words}" if is_place else f": not YAML: {error}"
