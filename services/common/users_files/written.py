"""Files and folders that are written: where, and whether they may be."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from services.common.errors import EnvironmentLacks, UserError

P = TypeVar("P", Path, str)
STREAMS = ("/dev/", "/proc/")
"""Where /dev/stdout lies, which is a file where the shell leads it to one."""


def refuse_to_replace(name: str, file: Path, overwrite: bool, src: Path | None = None) -> None:
    """Raises UserError where a file is there that a command is to write, unless it may replace it. A pipe may
    be there, and what standard output leads to. name: of the file, for messages. src: what the command reads,
    of which its own check says more."""
    if file.is_dir():
        raise UserError(f"{name}: is a folder; expected the name of a file")
    is_source = src is not None and src.exists() and file.exists() and file.samefile(src)
    if file.is_file() and not str(file).startswith(STREAMS) and not overwrite and not is_source:
        raise UserError(f"{name}: is there already; --overwrite replaces it")


def refuse_to_lose(option: str, file: Path, read: Mapping[str, str | Path | None]) -> None:
    """Raises UserError where a command would write the file over what it reads, also through a link. read:
    by option or key; names that are no files count for nothing."""
    for name, path in read.items():
        if path and Path(path).is_file() and file.is_file() and file.samefile(path):
            raise UserError(f"{option} {file}: is what {name} reads; give another file to write")


def refuse_no_file(option: str, file: Path) -> None:
    """Raises UserError for a path at which no file can be made: that of a folder, and one in a folder that is
    not there, which is a slip more often than a wish."""
    if file.is_dir():
        raise UserError(f"{option} {file}: is a folder; expected the name of a file")
    if not file.parent.is_dir():
        raise UserError(
            f"{option} {file}: no folder {file.parent}; expected a file in a folder that is there"
        )


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


def one_out(command: str, given: P | None, option: P | None) -> P:
    """Where a command writes to, which is told by its last argument or by --out. Raises UserError."""
    if given is not None and option is not None:
        raise UserError(f"{command}: {given} and --out {option} both say where to write; give one of them")
    if (out := given or option) is None:
        raise UserError(f"{command}: it is not said where to write; give --out PATH, or PATH at the end")
    return out
