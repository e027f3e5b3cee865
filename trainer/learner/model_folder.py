"""What makes a folder a model that the learner can train."""

from __future__ import annotations

from pathlib import Path


class ModelFolderError(ValueError):
    """`model.path` is no folder of a causal language model with its tokenizer."""

    exit_code = 2


def check_model_folder(path: str | Path) -> Path:
    """The folder, if it holds a configuration, weights and a tokenizer. Raises ModelFolderError with what is
    missing."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelFolderError(
            f"model.path: {folder} is not a folder; expected one in Hugging Face form (config.json, safetensors, tokenizer)"
        )
    if not (folder / "config.json").is_file():
        raise ModelFolderError(f"model.path: {folder} has no config.json")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ModelFolderError(f"model.path: {folder} has no weights (*.safetensors)")
    if not any(
        (folder / name).is_file()
        for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    ):
        raise ModelFolderError(
            f"model.path: {folder} has no tokenizer (tokenizer.json or tokenizer_config.json)"
        )
    return folder
