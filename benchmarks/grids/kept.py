"""The compressed form of a cell's results, which is committed."""

from __future__ import annotations

import gzip
import io
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from services.common.files import write_atomically

DIGITS = 6
"""Significant digits that are kept."""
ABSENT = "-"
"""Stands for a metric that a step does not have; null is one that has no finite value."""


def short(value: Any) -> Any:
    """A number with DIGITS significant digits; anything else as it is."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The kind of machine, and the versions of the packages that are installed."""
    found = {"machine": platform.machine()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name, family and model of the processor: what decides how float32 sums are rounded."""
    known: dict[str, str] = {}
    with suppress(OSError):
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            known.setdefault(key.strip(), value.strip())
    if "model name" not in known:
        return platform.processor() or "unknown processor"
    return f"{known['model name']} (family {known.get('cpu family', '?')}, model {known.get('model', '?')})"


def columns_of(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[Any]]:
    """Those of the metrics that a step has, as columns."""
    return {
        name: [short(row[name]) if name in row else ABSENT for row in rows]
        for name in names
        if any(name in row for row in rows)
    }


def rows_of(kept: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps of a kept file, each with `step`, from its `steps` and `columns`."""
    rows = [{"step": step} for step in kept["steps"]]
    for name, values in kept["columns"].items():
        for row, value in zip(rows, values, strict=True):
            if value != ABSENT:
                row[name] = value
    return rows


def unpacked(file: Path) -> dict[str, Any]:
    """The content of a kept file."""
    with gzip.open(file, "rt", encoding="utf-8") as text:
        content: dict[str, Any] = json.load(text)
    return content


def keep(file: Path, content: Mapping[str, Any], *, replace: bool) -> str:
    """Write a cell's content, whose `header` has its `fingerprint`. Returns `written`, `same bits` or `other
    bits` (kept as it was, unless `replace`)."""
    if file.exists() and not replace:
        same = unpacked(file)["header"]["fingerprint"] == content["header"]["fingerprint"]
        return "same bits" if same else "other bits"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, compressed(json.dumps(content, separators=(",", ":"))))
    return "written"


def compressed(text: str) -> bytes:
    """The same bytes for the same text: no time and no name inside."""
    data = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=data, mtime=0) as packed:
        packed.write(text.encode())
    return data.getvalue()
