"""What a model folder holds, in a form small enough for a checkpoint: its configuration, tokenizer and
weights.

Two folders with the same description are the same model, wherever they lie and however their weights are
sharded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from services.common.errors import UserError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
)
INDIFFERENT = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
)
"""Entries of config.json and tokenizer_config.json that do not change what the model computes in a
learner."""
SAMPLE_BYTES = 4096
GIT_LFS = b"version https://git-lfs"
"""What a pointer begins with that stands where Git LFS has not fetched a file."""
SHOWN = 12
"""Digits of a checksum in a message."""


class Difference(NamedTuple):
    """One thing that is not the same in two descriptions: its name, and both values as text."""

    what: str
    before: str
    now: str


def describe(folder: Path) -> dict[str, Any]:
    """`{"config": entries of config.json, "tokenizer": {file: SHA-256}, "weights": SHA-256 or None}`,
    JSON-able.

    JSON files count by what they say, not by their layout. Raises UserError for a torn file.
    """
    config = _read(folder / "config.json")
    tokenizer = {name: _digest(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()}
    return {"config": config, "tokenizer": tokenizer, "weights": weights_digest(folder)}


def weights_digest(folder: Path) -> str | None:
    """SHA-256 over each weight's name, type, shape and a sample of 4 KiB from its middle; None where there
    are no weights.

    A sample of each is enough to tell two trainings apart, and takes no time for a model of any size.
    """
    entries = sorted(entry for file in folder.glob("*.safetensors") for entry in _safetensors(file))
    if not entries:
        entries = sorted(entry for file in folder.glob("*.bin") for entry in _plain(file))
    if not entries:
        return None
    digest = hashlib.sha256()
    for about, sample in entries:
        digest.update(about.encode() + b"\0" + sample)
    return digest.hexdigest()


def differences(before: dict[str, Any], now: dict[str, Any], *, weights: bool) -> list[Difference]:
    """What changed from one description to another. weights: whether the starting weights count; they must be
    known in both."""
    found = []
    for name, old, new in _entries(before["config"], now["config"]):
        found.append(Difference(f"config.json: {name}", _shown(old), _shown(new)))
    old_files, new_files = before["tokenizer"], now["tokenizer"]
    for name in sorted(old_files.keys() | new_files.keys()):
        old, new = old_files.get(name), new_files.get(name)
        if old != new:
            found.append(
                Difference(f"tokenizer: {name}", (old or "no file")[:SHOWN], (new or "no file")[:SHOWN])
            )
    if weights and before["weights"] and now["weights"] and before["weights"] != now["weights"]:
        found.append(Difference("base weights", before["weights"][:SHOWN], now["weights"][:SHOWN]))
    return found


def _entries(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Name and both values of each entry that differs; nested ones by their dotted name."""
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if key in INDIFFERENT or old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _entries(old, new, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", old, new


def _shown(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _read(path: Path) -> Any:
    with _whole(path, "JSON"):
        content = json.loads(path.read_text(encoding="utf-8"))
    return (
        {k: v for k, v in content.items() if k not in INDIFFERENT} if isinstance(content, dict) else content
    )


def _digest(path: Path) -> str:
    if path.suffix == ".json":
        return hashlib.sha256(json.dumps(_read(path), sort_keys=True).encode()).hexdigest()
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _safetensors(file: Path) -> Iterator[tuple[str, bytes]]:
    """Raises UserError for a file that is none, or was cut short."""
    header, first = read_header(file)
    room = file.stat().st_size - first
    with _whole(file, "safetensors"):
        with file.open("rb") as handle:
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                if not 0 <= begin <= end <= room:
                    raise ValueError(f"{name} lies beyond the end of the file")
                size = min(SAMPLE_BYTES, end - begin)
                handle.seek(first + begin + (end - begin - size) // 2)
                yield f"{name} {entry['dtype']} {entry['shape']}", handle.read(size)


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """What a safetensors file says of each of its tensors, by name, and the byte at which the first one
    begins. Raises UserError for a file that is none, or that ends before them."""
    size = file.stat().st_size
    with _whole(file, "safetensors"):
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if length > size - 8:
                raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
            header = dict(json.loads(handle.read(length)).items())
    header.pop("__metadata__", None)
    return header, 8 + length


@contextmanager
def _whole(file: Path, form: str) -> Iterator[None]:
    """Around the reading of a file of the model: raises UserError for one that is none, or was cut short."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"model.path: {file} is no whole {form} file: {error}{_pointer(file)}") from error


def _pointer(file: Path) -> str:
    """What to do about a file that Git LFS has not fetched."""
    with file.open("rb") as handle:
        return "; fetch it with git lfs pull" if handle.read(len(GIT_LFS)) == GIT_LFS else ""


def _plain(file: Path) -> Iterator[tuple[str, bytes]]:
    size = file.stat().st_size
    with file.open("rb") as handle:
        for part in range(16):
            handle.seek(size * part // 16)
            yield f"{file.name} {size} {part}", handle.read(SAMPLE_BYTES)
