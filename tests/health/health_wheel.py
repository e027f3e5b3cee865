"""The thin wheel, built by its own backend without an index, and unpacked beside what it depends on."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from places import ROOT

BUILD = "import collect, sys; print(collect.build_wheel(sys.argv[1]))"


def build(folder: Path) -> Path:
    """The wheel's file."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)],
        cwd=ROOT / "packages" / "health",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / done.stdout.splitlines()[-1]


def unpack(wheel: Path, folder: Path) -> Path:
    """What `pip install --target` would put there, without its dependencies."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder
