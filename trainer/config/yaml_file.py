"""Reading the file of a configuration: what is wrong with it is one line, with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from services.common.errors import UserError
from services.common.names import nearest


def read_yaml(path: Path) -> dict[str, Any]:
    """The sections of a YAML file. Raises UserError."""
    yaml = YAML(typ="safe", pure=True)  # YAML 1.2: `off` is a word, 1e-4 a number
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise UserError(f"{path}: cannot be read ({why}){_near_file(path)}") from e
    except MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{path}{place}: not YAML: {e.problem or e.context}") from e
    except (YAMLError, ValueError, RecursionError) as e:  # ValueError: a date or number that is none
        raise UserError(f"{path}: not YAML: {' '.join(str(e).split())}") from e
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected sections (run, model, data, ...), got {type(raw).__name__}")
    return raw


def _near_file(path: Path) -> str:
    """`; did you mean mine.yaml?` where the folder has a file with a name like it."""
    try:
        near = nearest(path.name, [file.name for file in path.parent.glob("*.y*ml")])
    except OSError:
        return ""
    return f"; did you mean {path.with_name(near)}?" if near and not path.exists() else ""
