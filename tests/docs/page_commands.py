"""The blocks ```sh of README and docs, and a shell that runs one as a reader types it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from end_to_end import ENVIRONMENT
from places import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(?:<!-- not run: (?P<why>.+?) -->\n)?```sh\n(?P<text>.*?)^```", re.M | re.S)


class Block(NamedTuple):
    page: str
    line: int
    why: str | None
    text: str


def blocks(page):
    text = page.read_text(encoding="utf-8")
    return [
        Block(page.name, text[: m.start("text")].count("\n") + 1, m["why"], m["text"])
        for m in BLOCK.finditer(text)
    ]


def as_typed(text: str, folder: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run commands in this folder, with `unspiral` on the PATH; the first that fails ends them."""
    program = folder / "bin" / "unspiral"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m trainer "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "-ec", text],
        cwd=folder,
        env=ENVIRONMENT | {"PATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
