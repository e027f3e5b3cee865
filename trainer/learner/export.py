"""A policy as a plain Hugging Face folder: the weights of a checkpoint or a warm start, with configuration
and tokenizer."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.common.errors import UserError
from services.common.files import hints, write_json
from trainer.learner.checkpoint import MANIFEST, STATE, find, require_whole, written_aside
from trainer.learner.model.lora import merge
from trainer.learner.model.model_identity import weights_digest
from trainer.learner.tensor_files import TensorReader, TensorWriter

if TYPE_CHECKING:
    from torch import Tensor

EXPORT_MARK = "unspiral_export.json"
_WEIGHTS = re.compile(r"\.(safetensors|bin|gguf|pt|pth|h5|msgpack|onnx)$|\.index\.json$")


def copy_model_files(source: Path, target: Path) -> None:
    """Configuration and tokenizer: all files of a model's folder but its weights and earlier marks."""
    target.mkdir(parents=True, exist_ok=True)
    for f in sorted(source.iterdir()):
        if f.is_file() and not _WEIGHTS.search(f.name) and f.name not in (EXPORT_MARK, MANIFEST):
            shutil.copyfile(f, target / f.name)


def may_export_to(out: Path) -> bool:
    """Whether nothing would be lost: `out` is absent, empty, or an earlier export."""
    return not out.exists() or (out / EXPORT_MARK).is_file() or (out.is_dir() and not any(out.iterdir()))


@contextlib.contextmanager
def exported(out: Path, model_files: Path, *, dtype: str, about: dict[str, Any]) -> Iterator[TensorWriter]:
    """A writer whose tensors become a Hugging Face folder at `out`. dtype: name of theirs, e.g. bfloat16.

    `out` may be absent, empty, or an earlier export; anything else is refused (UserError)."""
    if not may_export_to(out):
        raise UserError(f"{out} exists and is no earlier export; give a new folder")
    with written_aside(out) as folder:
        copy_model_files(model_files, folder)
        config = json.loads((folder / "config.json").read_text())
        # The older spelling of `dtype`, which would go on naming the type of the weights that training began
        # from.
        config.pop("torch_dtype", None)
        write_json(folder / "config.json", config | {"dtype": dtype}, indent=1, sort_keys=True)
        write_json(folder / EXPORT_MARK, about, indent=1, sort_keys=True)
        writer = TensorWriter(folder)
        yield writer
        writer.finish()


def export_checkpoint(checkpoint: str | Path, out: str | Path) -> Path:
    """A checkpoint's policy as a plain Hugging Face folder with tokenizer, in the run's compute dtype.
    `checkpoint` is what `find` takes.
    Raises UserError."""
    import torch

    checkpoint = find(checkpoint)
    out = Path(out)
    require_whole(checkpoint)
    about = json.loads((checkpoint / "learner.json").read_text())
    read = TensorReader(checkpoint / "weights")
    dtype = getattr(torch, about["dtype"])
    description = {"optimiser_steps": about["optimiser_steps"]}
    identity = hints(checkpoint / STATE).get("identity")
    if isinstance(identity, dict) and identity.get("asked"):  # earlier versions kept none
        description["asked"] = identity["asked"]
    with exported(out, checkpoint / "model", dtype=about["dtype"], about=description) as writer:
        for name, weight in _whole_weights(read, about.get("lora")):
            writer.add(name, weight.to(dtype))
    return out


def _whole_weights(read: TensorReader, lora: dict[str, Any] | None) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) of a checkpoint; of one that holds adapters alone, the frozen weights with these
    added."""
    if lora is None:
        yield from ((name, read(name)) for name in read.names)
        return
    if not any(Path(lora["base"]).glob("*.safetensors")):
        raise UserError(
            f"the checkpoint holds LoRA adapters for the weights in {lora['base']}, which are not there"
        )
    if lora.get("weights") not in (None, weights_digest(Path(lora["base"]))):
        raise UserError(
            f"the checkpoint holds LoRA adapters for other weights than those that are in {lora['base']} now"
        )
    base = TensorReader(Path(lora["base"]))
    adapters = set(read.names)
    for name in base.names:
        yield name, merge(name, base(name), lambda n: read(n) if n in adapters else None, lora["scale"])
