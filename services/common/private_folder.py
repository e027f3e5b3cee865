"""A folder for temporary files under names that others could guess: only this user can write there, or put a
link in its place."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def private_folder(within: str | None = None) -> Path:
    """This user's own folder in the temporary folder (or in `within`), mode 0700. Raises PermissionError
    where another user made one of its name."""
    folder = Path(within or tempfile.gettempdir()) / f"unspiral-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            raise PermissionError(
                f"{folder}: is not a folder of this user's; remove it, or set TMPDIR to another place"
            ) from None
        if stat.S_IMODE(about.st_mode) != 0o700:
            folder.chmod(0o700)
    return folder


def is_own_file(path: Path, *others: int) -> bool:
    """Whether a path is a plain file, no link, that belongs to this user, to root, or to one of `others`
    (user ids), and that nobody else can write."""
    try:
        about = path.lstat()
    except OSError:
        return False
    ours = about.st_uid in {os.getuid(), 0, *others}
    return stat.S_ISREG(about.st_mode) and ours and not about.st_mode & 0o022
