"""Files that are read whole."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.common.names import near_path
from services.common.users_files.yaml_text import parse_yaml

_NO_SUCH_FORM = (ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error)


def why_unread(error: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be read, for messages."""
    if isinstance(error, UnicodeDecodeError):
        return f"no {error.encoding.upper()} text: byte {error.start} is none of it"
    return error.strerror or str(error)


@contextmanager
def reading(name: str | Path, form: str) -> Iterator[None]:
    """Around the reading of a whole file, which is to be `form`. name: of the file, for messages, with the
    option or key that gave it. Raises UserError."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        hint = near_path(error.filename) if isinstance(error, FileNotFoundError) and error.filename else ""
        raise UserError(f"{name}: cannot be read ({why_unread(error)}){hint}") from error
    except _NO_SUCH_FORM as error:
        raise UserError(f"{name}: not {form} ({' '.join(str(error).split())})") from error


@contextmanager
def given_as(option: str, place: str | Path) -> Iterator[None]:
    """Inside, a mistake in the file or folder that an option named is told with the option before it."""
    try:
        yield
    except UserError as error:
        if str(error).startswith(str(place)):
            error.args = (f"{option} {error}",)
        raise


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


def load_yaml(file: Path) -> Any:
    """What a YAML file holds. Raises UserError."""
    with reading(file, "YAML"):
        return parse_yaml(file.read_text(encoding="utf-8"))
