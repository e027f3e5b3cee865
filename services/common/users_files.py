"""Files and folders that a user names. What is wrong with one becomes a line that names it."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.common.errors import EnvironmentLacks, UserError
from services.common.yaml_words import in_words

_NO_SUCH_FORM = (ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error)


@contextmanager
def reading(name: str | Path, form: str) -> Iterator[None]:
    """Around the reading of a whole file, which is to be `form`. name: of the file, for messages, with the
    option or key that gave it. Raises UserError."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise UserError(f"{name}: cannot be read ({why})") from error
    except _NO_SUCH_FORM as error:
        raise UserError(f"{name}: not {form} ({' '.join(str(error).split())})") from error


def load_json(file: Path, name: str = "") -> Any:
    """What a JSON file holds. Raises UserError."""
    with reading(name or file, "JSON"):
        return json.loads(file.read_bytes())  # UTF-8 with or without a mark, UTF-16


def load_object(file: Path, name: str = "") -> dict[str, Any]:
    """The object that a JSON file holds. Raises UserError."""
    found = load_json(file, name)
    if not isinstance(found, dict):
        raise UserError(f"{name or file}: expected a JSON object")
    return found


def parse_yaml(text: str) -> Any:
    """A YAML 1.2 text: `off` is a word, 1e-4 a number. Raises ValueError, which begins with `line N, column
    M: ` where the place is known."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        raise ValueError(in_words(error, text)) from error
    except (YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def load_yaml(file: Path) -> Any:
    """What a YAML file holds. Raises UserError."""
    with reading(file, "YAML"):
        return parse_yaml(file.read_text(encoding="utf-8"))


@contextmanager
def writing(name: str | Path) -> Iterator[None]:
    """Around what writes a file or folder. Raises EnvironmentLacks, which names it."""
    try:
        yield
    except OSError as error:
        raise EnvironmentLacks(f"{name}: cannot be written ({error.strerror or error})") from error


def make_folder(folder: Path, name: str) -> None:
    """Make a folder to write to, where it is not there. name: for messages, as in `reading`. Raises
    UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{name}: cannot be made ({error.strerror})") from error


def one_out(command: str, given: Path | None, option: Path | None) -> Path:
    """Where a command writes to, which is told by its last argument or by --out. Raises UserError."""
    if given is not None and option is not None:
        raise UserError(f"{command}: {given} and --out {option} both say where to write; give one of them")
    if (out := given or option) is None:
        raise UserError(f"{command}: it is not said where to write; give --out PATH, or PATH at the end")
    return out
