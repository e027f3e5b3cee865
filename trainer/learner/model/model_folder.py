"""The form of a folder that holds a model that the learner can train."""

from __future__ import annotations

from pathlib import Path

from services.common.errors import UserError
from trainer.data import models

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
"""Any of these files is a tokenizer's."""


def check_model_folder(path: str | Path) -> Path:
    """The folder, if it holds a configuration, weights that can be trained and a tokenizer. Raises UserError
    with what is missing."""
    if fault := fault_of_model_folder(path):
        raise UserError(fault)
    return Path(path)


def fault_of_model_folder(path: str | Path) -> str | None:
    """What is missing in a model's folder, or wrong with it, in one line; None where it is complete."""
    folder = Path(path)
    if not folder.is_dir():
        return (
            f"model.path: {folder} is not a folder; expected one in Hugging Face form "
            "(config.json, safetensors, tokenizer)"
        )
    if not (folder / "config.json").is_file():
        return f"model.path: {folder} has no config.json"
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        return f"model.path: {folder} has no weights (*.safetensors)"
    if not any((folder / name).is_file() for name in TOKENIZER):
        return f"model.path: {folder} has no tokenizer (tokenizer.json or tokenizer_config.json)"
    if form := models.quantised(folder):
        return f"model.path: {folder}: {models.NOT_TRAINED.format(form)}"
    return None
