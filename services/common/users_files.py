"""Files and folders that a user names. What is wrong with one becomes a line that names it."""

from __future__ import annotations

import csv
import errno
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.common.errors import EnvironmentLacks, UserError

if TYPE_CHECKING:
    from ruamel.yaml.error import MarkedYAMLError

_NO_SUCH_FORM = (ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error)
_YAML_WORDS = (
    (
        r"expected <block end>, but found '(<block mapping start>|-)'",
        "the indentation fits no line above; keys of one section begin in the same column",
    ),
    (
        r"expected <block end>, but found .*",
        "more text behind the end of a value; put quotes around the whole of it",
    ),
    (r"could not find expected ':'", "line {} has no `: `"),
    (r"found unexpected end of stream", "the quote that begins in line {} is not closed"),
    (r"found character '\\t' that cannot start any token", "a tab; indent by spaces"),
    (r"found character (.*) that cannot start any token", r"a text that begins with \1 needs quotes"),
    (
        r"(expected ',' or '.'), but got '<stream end>'",
        r"\1 for the bracket of line {}, got the end of the file",
    ),
    (r"(expected ',' or '.'), but got (.*)", r"\1 for the bracket of line {}, got \2"),
    (r"but found another document", "`---` begins a second document; expected one"),
)
"""What is wrong with a YAML text in plain words, by the parser's problem; {} is the line of its context."""


def refuse_to_replace(name: str, file: Path, overwrite: bool, src: Path | None = None) -> None:
    """Raises UserError where a file is there that a command is to write, unless it may replace it. name: of
    the file, for messages. src: what the command reads, of which its own check says more."""
    is_source = src is not None and src.exists() and file.exists() and file.samefile(src)
    if file.exists() and not overwrite and not is_source:
        raise UserError(f"{name}: is there already; --overwrite replaces it")


def refuse_to_lose(option: str, file: Path, read: Mapping[str, str | Path | None]) -> None:
    """Raises UserError where a command would write the file over what it reads, also through a link. read:
    by option or key; names that are no files count for nothing."""
    for name, path in read.items():
        if path and Path(path).is_file() and file.is_file() and file.samefile(path):
            raise UserError(f"{option} {file}: is what {name} reads; give another file to write")


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
        raise ValueError(_in_words(error, text)) from error
    except (YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def _in_words(error: MarkedYAMLError, text: str) -> str:
    """`line 3, column 2: a tab; indent by spaces`, of an error of ruamel in a text."""
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    context = error.context_mark.line + 1 if error.context_mark else "above"
    problem = " ".join((error.problem or error.context or "").replace("\t", "\\t").split())
    if twice := re.match(r'found duplicate key "(.*?)" with value', problem):
        first = _line_of_key(text, twice[1], error.context_mark)
        return f"{place}the key {twice[1]} stands twice" + (f", first in line {first}" if first else "")
    for pattern, words in _YAML_WORDS:
        if found := re.fullmatch(pattern, problem):
            return place + found.expand(words).replace("{}", str(context))
    if problem == "mapping values are not allowed here" and mark is not None:
        return place + _colon(text.split("\n")[: mark.line + 1], mark.column)
    return place + problem


def _colon(lines: list[str], column: int) -> str:
    """Why the last line may have no `: ` at this column, from 0."""
    if ": " in lines[-1][:column]:
        return "a second `: ` in the line; a text with one needs quotes"
    number = next((n for n in range(len(lines) - 1, 0, -1) if lines[n - 1].strip()), 0)
    if number and ":" in lines[number - 1]:
        return f"the line is indented deeper than line {number}, which has a value already"
    return f"line {number} above has no `: `"


def _line_of_key(text: str, key: str, start: Any) -> int | None:
    """The first line, from 1, of a key of the mapping that begins at the mark `start`."""
    from ruamel.yaml import YAML
    from ruamel.yaml.nodes import MappingNode, SequenceNode

    waiting: list[Any] = [YAML(typ="safe", pure=True).compose(text)]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias; a node may hold itself
            continue
        seen.add(id(node))
        if isinstance(node, SequenceNode):
            waiting += node.value
        if not isinstance(node, MappingNode):
            continue
        if start is not None and node.start_mark.index == start.index:
            lines = [name.start_mark.line + 1 for name, _ in node.value if name.value == key]
            return min(lines, default=None)
        waiting += [value for _, value in node.value]
    return None


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
    UserError, also where nothing can be written to it: what comes may take hours."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{name}: cannot be made ({error.strerror})") from error
    try:
        tempfile.TemporaryFile(dir=folder).close()  # asking for permissions would not tell root of /proc
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EOPNOTSUPP):
            raise UserError(f"{name}: cannot be written to ({error.strerror})") from error


def one_out(command: str, given: Path | None, option: Path | None) -> Path:
    """Where a command writes to, which is told by its last argument or by --out. Raises UserError."""
    if given is not None and option is not None:
        raise UserError(f"{command}: {given} and --out {option} both say where to write; give one of them")
    if (out := given or option) is None:
        raise UserError(f"{command}: it is not said where to write; give --out PATH, or PATH at the end")
    return out
