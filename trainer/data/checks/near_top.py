"""Whether a large folder is one of questions at all: one such as `/`, which nobody means, is told before all
of it is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from services.common.errors import UserError
from services.common.records.files import holds_data
from trainer.data.columns import Keys
from trainer.data.questions import BadRow, parsed

LEVELS = 3
FILES = 100
"""Files that are looked into."""
ENTRIES = 5000
"""Files and folders that are looked at."""
ROWS = 20
"""Rows of a file that are looked at."""


def refuse_without_questions(option: str, folder: Path, keys: Keys) -> None:
    """Raises UserError for a folder where no file near its top has a question, and that has more than what is
    looked at here. Of one that has no more its reading says what is wrong."""
    if not folder.is_dir():
        return
    for looked, file in enumerate(_near_top(folder)):
        if file is None or looked == FILES:
            raise UserError(
                f"{option} {folder}: no questions in the first {looked} files of its upper {LEVELS} levels; "
                "expected a file or folder of questions"
            )
        if _has_question(file, keys):
            return


def _near_top(folder: Path) -> Iterator[Path | None]:
    """Its files that may hold data, the uppermost first; None at last where it has more files or folders."""
    entries = 0
    level = [folder]
    for _ in range(LEVELS):
        below = []
        for place in level:
            with suppress(OSError), os.scandir(place) as found:  # one that may not be read
                for entry in sorted(islice(found, ENTRIES), key=lambda entry: entry.name):
                    entries += 1
                    if entries > ENTRIES:
                        yield None
                        return
                    if entry.is_dir(follow_symlinks=False):
                        below.append(Path(entry.path))
                    elif holds_data(Path(entry.path).relative_to(folder)) and _is_plain(entry):
                        yield Path(entry.path)
        level = below
    if level:
        yield None


def _is_plain(entry: os.DirEntry[str]) -> bool:
    """A file with something in it: those of /proc have a size of 0, and some wait for what never comes."""
    with suppress(OSError):
        return entry.is_file() and entry.stat().st_size > 0
    return False


def _has_question(file: Path, keys: Keys) -> bool:
    with suppress(UserError, OSError, ValueError):
        rows = islice(parsed(file, keys=keys.of_file(file)), ROWS)
        return any(not isinstance(row, BadRow) for row in rows)
    return False
