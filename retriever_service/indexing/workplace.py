"""The folder in which an index is built, beside its own, and how it takes that one's place."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from retriever_service.bm25.packed.build import MERGE_FILE
from retriever_service.errors import IndexInvalid
from retriever_service.index_folder.description import (
    META_FILE,
    REPLACED,
    file_digest,
    read_info,
    verify,
    work_of,
)
from retriever_service.index_folder.documents import TEXT_FILE
from retriever_service.index_folder.rows import BLOCKS_FILE, PLACES_FILE
from retriever_service.indexing.scan import PROGRESS_FILE, SCRATCH_FILES
from services.common.errors import EnvironmentLacks, UserError
from services.common.files import hints, lock, put_folder, write_atomically
from services.common.users_files import make_folder

Key = dict[str, Any]
"""What makes two builds the same, as JSON: format, backend, corpus, settings, and the way of building."""


def work_folder(out: Path) -> Path:
    """The folder to build in, beside `out`. Raises UserError, and IndexInvalid for one with other files."""
    if not out.name:
        raise UserError(f"--out {out}: expected a folder that can be renamed, such as index/")
    work = work_of(out)
    make_folder(work, f"--out {out}: the folder {work}")
    if any(work.iterdir()) and not (work / "lock").is_file():
        raise IndexInvalid(f"{work}: holds files that are of no build; remove it, or give another --out")
    return work


def sealed(work: Path, key: Key) -> bool:
    """Whether a build with this key came to its end there, and only was not given its place."""
    try:
        verify(work)
    except (IndexInvalid, OSError):
        return False
    return hints(work / PROGRESS_FILE).get("key") == key


def seal_folder(work: Path, description: dict[str, Any], left_out: Iterable[str] = ()) -> None:
    """Write `meta.json`: the description, and the files of the folder with their checksums, but for those
    that only the build needed."""
    unlisted = {"lock", META_FILE, MERGE_FILE, *SCRATCH_FILES, *left_out}
    found = {str(p.relative_to(work)): p for p in sorted(work.rglob("*")) if p.is_file()}
    if not (work / BLOCKS_FILE).stat().st_size:  # no row has other fields
        unlisted |= {BLOCKS_FILE, PLACES_FILE}
    files = {
        name: {"bytes": p.stat().st_size, "sha256": file_digest(p)}
        for name, p in found.items()
        if name not in unlisted and not name.endswith(".tmp") and not name.startswith(f"{REPLACED}/")
    }
    meta = orjson.dumps(description | {"files": files}, option=orjson.OPT_INDENT_2)
    write_atomically(work / META_FILE, meta, durable=True)


def tidy(folder: Path) -> None:
    """Remove what only the build needed."""
    listed = read_info(folder).files
    for path in [*folder.iterdir()]:
        if path.is_file() and path.name not in (META_FILE, *listed):
            path.unlink()


def put(work: Path, out: Path) -> None:
    """Give a sealed build its place. What stands there goes into it first, so that at every moment a whole
    index is there to go on with."""
    replaced = work / REPLACED
    if out.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    put_folder(work, out, earlier=replaced)
    tidy(out)
    shutil.rmtree(out / REPLACED, ignore_errors=True)


def put_back(out: Path) -> bool:
    """Put an index back that a killed process had moved away and not replaced yet. Returns whether there was
    one."""
    replaced = work_of(out) / REPLACED
    if out.exists() or not (replaced / META_FILE).is_file():
        return False
    put_folder(replaced, out, earlier=replaced)
    return True


@contextmanager
def full_disk_said(work: Path) -> Iterator[None]:
    """Inside, a full disk is EnvironmentLacks."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise EnvironmentLacks(
            f"disk of {work}: {error.strerror}; make room and give the same command again, which goes on "
            "where it was"
        ) from None


@contextmanager
def useless_removed(work: Path, key: Key) -> Iterator[None]:
    """Around a build, in its lock: where it is refused, its folder is removed, or the line says what it is
    kept for.

    A malformed corpus must change, and then is another corpus: nothing that was built of it is gone on with.
    A corpus that could not be read, or a machine that lacks something, may be as it was the next time.
    """
    try:
        yield
    except (UserError, EnvironmentLacks) as error:
        progress = hints(work / PROGRESS_FILE)
        others = bool(progress) and progress.get("key") != key
        whole = (work / META_FILE).exists() or (work / REPLACED).exists()
        if not others and not whole:
            malformed = type(error) is UserError and not isinstance(error.__context__, OSError)
            if malformed or not any(file.name != "lock" for file in work.iterdir()):
                shutil.rmtree(work, ignore_errors=True)
            elif progress.get("passages") and str(work) not in str(error):
                error.args = (f"{error}; {work} keeps what was built, and the same command goes on there",)
        raise


def folder_meant(index: str | Path) -> Path:
    """The folder of an index, as it was given; where a link leads, and the name of `.`, since work is done
    beside it."""
    given = Path(index)
    return given.resolve() if given.is_symlink() or given.name in ("", "..") else given


@contextmanager
def changing(index: Path) -> Iterator[Path]:
    """Inside, no other command changes the index; gives the folder to work in.

    The lock of that folder goes away with it, as soon as an addition is moved into the index and before it
    counts, so that a file of the index that no change replaces is locked, too.
    """
    work = work_folder(index)
    with locked(work):
        try:
            put_back(index)
            read_info(index)
            with locked(index, TEXT_FILE):
                yield work
        except BaseException:
            if work.is_dir() and [path.name for path in work.iterdir()] == ["lock"]:  # nothing to go on with
                shutil.rmtree(work, ignore_errors=True)
            raise


@contextmanager
def locked(folder: Path, file: str = "lock") -> Iterator[None]:
    """Inside, no other process is. Raises EnvironmentLacks where one is now."""
    taken = f"{folder}: another build is at work in it"
    with lock(folder / file, lambda holder: EnvironmentLacks(taken + holder)):
        yield
