"""Parameters of a model, by its files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from services.common.users_files import load_object, reading
from trainer.config.learner import LoRASettings
from trainer.learner.model.model_identity import read_header


def parameter_count(model: Path) -> int:
    """Parameters of a Hugging Face folder. Raises UserError where a file of its weights is not whole."""
    return sum(math.prod(shape) for _, shape in _shapes(model))


def parameters_by_config(model: Path) -> int | None:
    """Parameters by the sizes in config.json, of a folder that has it and no weights yet; None for another.
    Raises UserError where it is no decoder whose layers are alike: experts are counted by their weights."""
    file = model / "config.json"
    if not file.is_file() or any(model.glob("*.safetensors")):
        return None
    settings = load_object(file, f"{model}: config.json")
    experts = any("expert" in name for name in settings)
    with reading(f"{model}: no weights there, and config.json", "the sizes of a decoder"):
        if experts:
            raise ValueError("it has experts; fetch the weights first")
        width, heads = settings["hidden_size"], settings["num_attention_heads"]
        head = settings.get("head_dim") or width // heads
        attention = width * head * 2 * (heads + (settings.get("num_key_value_heads") or heads))
        layer = attention + 3 * width * settings["intermediate_size"] + 2 * width
        embeddings = (1 if settings.get("tie_word_embeddings") else 2) * settings["vocab_size"] * width
        return int(settings["num_hidden_layers"] * layer + embeddings + width)


def adapter_count(model: Path, lora: LoRASettings) -> int:
    """Parameters of the adapters that `learner.lora` puts beside a model's layers. Raises UserError as
    `parameter_count` does."""
    return sum(lora.rank * sum(shape) for name, shape in _shapes(model) if _gets_adapter(name, shape, lora))


def _gets_adapter(name: str, shape: list[int], lora: LoRASettings) -> bool:
    layer = name.removesuffix(".weight")
    if len(shape) != 2 or layer.endswith("embed_tokens"):
        return False
    if lora.targets == "all-linear":
        return not layer.endswith("lm_head")
    return layer.endswith(tuple(lora.targets))


def _shapes(model: Path) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of a folder's tensors, from the headers of its safetensors files."""
    for file in sorted(model.glob("*.safetensors")):
        for name, entry in read_header(file)[0].items():
            yield name, entry["shape"]
