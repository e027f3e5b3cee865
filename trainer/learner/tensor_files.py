"""Tensors in folders of safetensors shards, under their Hugging Face names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.errors import UserError
from services.common.files import move, write_json

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"


class TensorWriter:
    """Named tensors into a folder of safetensors shards, with an index where there is more than one (Hugging
    Face form)."""

    def __init__(self, folder: Path, shard_bytes: int = 2**30):
        self.folder = folder
        self.shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._bytes = 0
        self._where: dict[str, str] = {}
        self._shards = 0
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Keep a copy in host memory until the shard is full."""
        # `clone` too, where it is on the CPU already: the source may use its memory for the next one.
        self._pending[name] = tensor.detach().cpu().clone().contiguous()
        self._bytes += tensor.nbytes
        if self._bytes >= self.shard_bytes:
            self._flush()

    def finish(self) -> None:
        """Write what is left, and the index."""
        self._flush()
        if self._shards == 1:
            move(self.folder / "model-00001.safetensors", self.folder / "model.safetensors")
        else:
            index = {"metadata": {}, "weight_map": self._where}
            write_json(self.folder / INDEX, index, indent=1, sort_keys=True)

    def _flush(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if self._pending:
            self._shards += 1
            file = f"model-{self._shards:05d}.safetensors"
            try:
                save_file(self._pending, self.folder / file, metadata={"format": "pt"})
            except SafetensorError as e:  # its word for a full disk
                raise OSError(str(e)) from e
            self._where |= dict.fromkeys(self._pending, file)
            self._pending = {}
            self._bytes = 0


class TensorReader:
    """Tensors of a folder that TensorWriter wrote, one at a time."""

    def __init__(self, folder: Path):
        from safetensors import safe_open

        index = folder / INDEX
        names = (
            sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if index.is_file()
            else ["model.safetensors"]
        )
        self._files = [safe_open(folder / n, framework="pt") for n in names]
        # A file is no mapping, so that its names are asked for.
        self._where = {key: f for f in self._files for key in f.keys()}  # noqa: SIM118

    @property
    def names(self) -> list[str]:
        return list(self._where)

    def __call__(self, name: str) -> Tensor:
        """The tensor, on the CPU. Raises UserError if there is none of that name."""
        if name not in self._where:
            raise UserError(f"the checkpoint has no tensor {name}: it is of another model")
        return self._where[name].get_tensor(name)
