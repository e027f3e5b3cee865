"""Package indexes in folders that look like the public ones: each wheel holds real metadata and no code, so
that resolvers can be run on them."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from importlib import metadata
from pathlib import Path

LOCAL_ONLY = ("unspiral",)
MADE_UP = {
    "torchvision": ("0.28.0", "torch==2.13.0"),
    "torchaudio": ("2.11.0", ""),
    "torchcodec": ("0.14.0", ""),
}
"""What the CPU build of vLLM names and `make setup` leaves out: version and requirement of stand-ins."""

BACKEND = """
import pathlib, tomllib
from stub_index import write_wheel
PROJECT = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
def build_wheel(folder, config_settings=None, metadata_directory=None):
    needs = [*PROJECT["dependencies"]]
    for extra, lines in PROJECT["optional-dependencies"].items():
        needs += [f"{line} ; extra == '{extra}'" for line in lines]
    extras = PROJECT["optional-dependencies"]
    return write_wheel(pathlib.Path(folder), PROJECT["name"], PROJECT["version"], needs, extras).name
"""
"""Builds the project's own wheel from its pyproject.toml, without a package from an index."""


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    requires: list[str],
    extras: list[str] = (),
    files: dict[str, bytes] | None = None,
    tag: str = "py3-none-any",
) -> Path:
    """A wheel of metadata alone, or with the given files."""
    file_name = name.replace("-", "_")
    path = folder / f"{file_name}-{version}-{tag}.whl"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {r}" for r in requires]
    info = f"{file_name}-{version}.dist-info"
    content = {
        **(files or {}),
        f"{info}/METADATA": "\n".join(lines).encode() + b"\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: stub\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    record = "".join(f"{n},sha256={_digest(c)},{len(c)}\n" for n, c in content.items()) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, data in (content | {f"{info}/RECORD": record.encode()}).items():
            entry = zipfile.ZipInfo(member)
            entry.external_attr = 0o755 << 16
            wheel.writestr(entry, data)
    return path


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def add_to_index(index: Path, wheel: Path) -> None:
    """Put a wheel into a simple index, under its project's page."""
    page = index / wheel.name.split("-")[0].replace("_", "-").replace(".", "-").lower() / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    target = page.parent / wheel.name
    wheel.rename(target)
    links = "".join(
        f'<a href="{w.name.replace("+", "%2B")}">{w.name}</a><br>' for w in sorted(page.parent.glob("*.whl"))
    )
    page.write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")


def make_indexes(root: Path, torch: str) -> tuple[Path, Path, Path]:
    """(bare index, PyTorch's CPU index, folder with one wheel of torch), of what is installed here. torch:
    version without a local part."""
    bare, pytorch, wheels = root / "simple", root / "cpu", root / "wheels"
    aside = root / "aside"
    for folder in (bare, pytorch, wheels, aside):
        folder.mkdir(parents=True)
    seen = set()
    for found in metadata.distributions():
        name = found.metadata["Name"]
        if name.lower() in seen or name.lower() in (*LOCAL_ONLY, *MADE_UP, "torch"):
            continue
        seen.add(name.lower())
        extras = found.metadata.get_all("Provides-Extra") or []
        add_to_index(bare, write_wheel(aside, name, found.version, found.requires or [], extras))
    needs = metadata.requires("torch") or []
    add_to_index(bare, write_wheel(aside, "torch", torch, needs))
    add_to_index(pytorch, write_wheel(aside, "torch", f"{torch}+cpu", needs))
    write_wheel(wheels, "torch", f"{torch}+cpu", needs)
    for name, (version, need) in MADE_UP.items():
        add_to_index(bare, write_wheel(aside, name, version, [need] if need else []))
        add_to_index(pytorch, write_wheel(aside, name, f"{version}+cpu", [need] if need else []))
    return bare, pytorch, wheels
