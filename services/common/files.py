"""Files and folders that others find whole or not at all: written beside their place, then renamed. Nothing
else renames.

A reader, or a process that is killed, never meets half a file. What is made has the mode that `open` would
give it (the umask's), whichever library wrote it: some make their files readable by the owner alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from services.common.scratch import held, remove_abandoned

OWNER_ALONE = 0o600
"""The mode of files that `tempfile` and safetensors make."""


@contextlib.contextmanager
def named(path: Path) -> Iterator[Path]:
    """Inside, an OSError without a file name gets this one: Python names the file that cannot be opened, but
    not the full disk's."""
    try:
        yield path
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def written_aside(path: str | Path, *, durable: bool = False) -> Iterator[Path]:
    """A name beside `path` to write a file to. When the block ends, that file replaces `path`; after an error
    it is removed.

    durable: the file survives a power cut, too. OSErrors name `path`. A link is followed; what is no regular
    file, such as /dev/stdout, is written to as it is.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with named(path):
            yield path
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.tmp")
    try:
        yield aside
        readable_as_usual(aside)
        if durable:
            sync(aside)
        os.replace(aside, path)
        if durable:
            sync(path.parent)
    except OSError as error:
        if error.filename in (None, str(aside), aside):
            error.filename = str(path)
            error.filename2 = None
        raise
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()


def write_atomically(path: str | Path, content: str | bytes, *, durable: bool = False) -> None:
    """Give a file new content in one step. Text is written as UTF-8."""
    data = content.encode() if isinstance(content, str) else content
    with written_aside(path, durable=durable) as aside:
        aside.write_bytes(data)


def write_json(path: str | Path, value: Any, **options: Any) -> None:
    """Give a file a JSON text with a line break at its end in one step. options: `json.dumps`'s."""
    write_atomically(path, json.dumps(value, **options) + "\n")


@contextlib.contextmanager
def folder_written_aside(path: Path, *, keep: bool = False) -> Iterator[Path]:
    """A new folder beside `path` to fill. When the block ends, it replaces `path`; after an error it is
    removed. A link is followed.

    keep: a folder that another process has put there meanwhile stays, and the new one is dropped.
    """
    path = followed(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    earlier = path.with_name(f".{path.name}.{os.getpid()}.old")
    shutil.rmtree(aside, ignore_errors=True)
    remove_abandoned(path.parent, f".{path.name}.", ".tmp")
    try:
        aside.mkdir()
        with held(aside):
            yield aside
            readable_as_usual(aside)
            if not (keep and path.exists()):
                put_folder(aside, path, earlier=earlier, keep=keep)
        # Only now: where a process was killed between the two renames, it is all that was left of the name.
        remove_abandoned(path.parent, f".{path.name}.", ".old")
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(earlier, ignore_errors=True)


def followed(path: Path) -> Path:
    """Where a link leads to, whether something is there or not; any other path as it is. For a folder that is
    replaced: the link would be, and its folder would stay as it was."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def put_folder(made: Path, place: Path, *, earlier: Path, keep: bool = False) -> None:
    """Rename the folder `made` to `place`. A folder or link that stood there is renamed to `earlier`, which
    must be free. A link keeps its target: to replace that, give `followed(place)`.

    keep: one that another process puts there in between stays, and `made` where it is.

    At each moment a whole folder has one of both names.
    """
    while not (keep and place.exists()):
        if os.path.lexists(place):  # also a link that leads nowhere, over which no folder can be renamed
            with contextlib.suppress(FileNotFoundError):  # another process has taken it away in between
                os.rename(place, earlier)
        try:
            os.rename(made, place)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        # Another process has put one there in between. What stood there before is of no more use.
        if earlier != made:
            shutil.rmtree(earlier, ignore_errors=True)


def move(source: Path, target: Path) -> None:
    """Rename within a file system; a file at `target` is replaced."""
    os.replace(source, target)


def link_or_copy(source: Path, target: Path) -> None:
    """The same file at another place, without a copy where the file system can."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def readable_as_usual(path: Path) -> None:
    """Give a file that was made for its owner alone, or all such files of a folder, the mode that `open`
    gives."""
    usual = 0o666 & ~umask()
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    for file in files:
        if stat.S_IMODE(file.stat().st_mode) == OWNER_ALONE != usual:
            file.chmod(usual)


def umask() -> int:
    """This process's umask. Python reads it by setting another, which the files of other threads would get:
    Linux just tells."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def sync(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(path: Path, refused: Callable[[str], Exception] | None = None) -> TextIO:
    """An open file that is locked until it is closed. Where another process holds it, raises what `refused`
    makes of its holder (as `holder_of`), otherwise BlockingIOError. Raises OSError."""
    with contextlib.ExitStack() as undo:
        handle = undo.enter_context(open(path, "a"))  # the lock lives as long as the handle
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if refused is None:
                raise
            raise refused(holder_of(path)) from error
        undo.pop_all()
    return handle


def holder_of(path: Path) -> str:
    """Who holds the lock of a file, for messages: ` (process 4711)`. Empty where Linux does not say: for
    another host's, or another container's."""
    with contextlib.suppress(OSError, ValueError):
        file = path.stat()
        place = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if "FLOCK" in words and place in words and int(pid := words[words.index(place) - 1]) > 0:
                return f" (process {pid})"
    return ""


def append_json(path: Path, record: dict[str, Any]) -> None:
    """Append a record as one line. Where an earlier writer was killed inside its line, that line is closed
    first."""
    line = json.dumps(record, ensure_ascii=False) + "\n"
    with named(path), open(path, "ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else "\n" + line
        file.write(line.encode())


def hints(path: Path) -> dict[str, Any]:
    """The object of a small JSON file that a run can do without; empty where it is absent, torn, or of
    another form."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; none where there is no file. A line that was cut off by a kill, or
    is no JSON for another reason, is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with contextlib.suppress(ValueError, RecursionError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def keep_json_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Write a file of JSON lines anew with the wanted records alone, their text as it was. Lines that were
    cut off go too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
            if wanted(json.loads(line)):
                kept.append(line + "\n")
    write_atomically(path, "".join(kept))
