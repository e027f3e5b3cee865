"""The build backend of `unspiral-health`: setuptools, on a folder that is collected from this tree.

What `unspiral_health` imports of Unspiral's own packages, directly or not, is written below
`unspiral_health/_unspiral/` with its imports renamed. So the repository holds each module once, and the wheel
brings no package called `services` or `trainer`, as a user's own project often has one.

    pip wheel --no-deps ./packages/health
    pip install "git+https://.../unspiral#subdirectory=packages/health"

The source distribution is what was collected, and builds without this tree.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from setuptools import build_meta

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE = "unspiral_health"
OURS = ("services", "trainer", "retriever_service")
PREFIX = f"{PACKAGE}._unspiral"


class CannotCollect(Exception):
    """A module that is wanted, and that cannot be renamed; the line names it."""


def file_of(root: Path, module: str) -> Path | None:
    """The file of a module of this tree; None for a name that is none."""
    path = root.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def imports_of(root: Path, file: Path) -> set[str]:
    """Modules of this tree that a file imports anywhere. Raises CannotCollect for forms that are not
    renamed."""
    found = set()
    where = file.relative_to(root)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                raise CannotCollect(f"{where}:{node.lineno}: a relative import; write the whole name")
            names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
            if any(n.split(".")[0] in OURS for n in names):
                raise CannotCollect(f"{where}:{node.lineno}: write `from PACKAGE import MODULE`")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _is_ours(node.value) and file_of(root, node.value):
                raise CannotCollect(f"{where}:{node.lineno}: {node.value!r} is a module by its name")
            continue
        else:
            continue
        found |= {n for n in names if n.split(".")[0] in (*OURS, PACKAGE) and file_of(root, n)}
    return found


def _is_ours(text: str) -> bool:
    return re.fullmatch(rf"(?:{'|'.join(OURS)})(?:\.\w+)+", text) is not None


def closure(root: Path) -> dict[str, Path]:
    """Every module of the wheel by its name in this tree: those of the package, what they import, and the
    packages around it."""
    waiting = [
        ".".join(f.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for f in sorted((root / PACKAGE).rglob("*.py"))
    ]
    found: dict[str, Path] = {}
    while waiting:
        module = waiting.pop()
        file = file_of(root, module)
        if module in found or file is None:
            continue
        found[module] = file
        parts = module.split(".")
        waiting += [".".join(parts[:n]) for n in range(1, len(parts))]
        waiting += imports_of(root, file)
    return found


def renamed(text: str) -> str:
    """The text of a module with its imports of this tree's packages as the wheel has them."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = line.replace(f"from {node.module} ", f"from {PREFIX}.{node.module} ", 1)
    return "".join(lines)


def collect(into: Path, root: Path = ROOT) -> None:
    """Write the source distribution's files: package, licence, version, and a pyproject.toml that builds
    without this file."""
    for module, file in closure(root).items():
        name = module if module.split(".")[0] == PACKAGE else f"{PREFIX}.{module}"
        path = into.joinpath(*name.split("."))
        path = path / "__init__.py" if file.name == "__init__.py" else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(renamed(file.read_text(encoding="utf-8")), encoding="utf-8")
    private = into.joinpath(*PREFIX.split("."), "__init__.py")
    private.write_text('"""Unspiral\'s own modules, renamed. Not an interface: import unspiral_health."""\n')
    (into / PACKAGE / "py.typed").touch()
    shutil.copy(root / "LICENSE", into)
    shutil.copy(HERE / "README.md", into)
    whole = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    (into / "VERSION").write_text(whole["project"]["version"] + "\n")
    own = (HERE / "pyproject.toml").read_text(encoding="utf-8")
    plain = own.replace('"collect"\nbackend-path = ["."]', '"setuptools.build_meta"')
    (into / "pyproject.toml").write_text(plain, encoding="utf-8")


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """Within it, the working folder is what was collected."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="unspiral-health-") as folder:
        collect(Path(folder))
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """PEP 517."""
    target = os.path.abspath(wheel_directory)
    with collected():
        return build_meta.build_wheel(target, config_settings)


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """PEP 517."""
    target = os.path.abspath(sdist_directory)
    with collected():
        return build_meta.build_sdist(target, config_settings)
