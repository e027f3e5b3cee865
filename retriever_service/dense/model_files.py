"""Models by folder or hub name. A wrong name gives one line, and not the tracebacks of the Hugging Face
libraries."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.common.errors import EnvironmentLacks, UserError
from services.common.hub import hub_name
from services.common.names import near_path

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_model(what: str, model: str) -> None:
    """Raises UserError where `model` is neither a folder nor what could be the name of a model on the
    hub."""
    is_path = model.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(model)
    if not Path(model).exists() and is_path:
        raise UserError(
            f"{what} {model}: no such folder; expected the folder of a model, or its name on the hub "
            f"(ORG/NAME){near_path(model, Path.is_dir)}"
        )


def read_as_text(model: Any) -> None:
    """From here on a sentence-transformers model reads `[SEP]` in a text as these characters, not as its
    separator."""
    model.tokenizer.split_special_tokens = True


@contextmanager
def loading(what: str, model: str) -> Iterator[None]:
    """Around the loading of a model. Raises UserError or EnvironmentLacks; warnings and progress bars of the
    loaders are left out."""
    check_model(what, model)
    from transformers.utils import logging as transformers_logging

    loggers = [
        logging.getLogger(name) for name in ("transformers", "sentence_transformers", "huggingface_hub")
    ]
    levels = [logger.level for logger in loggers]
    bars = transformers_logging.is_progress_bar_enabled()
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        transformers_logging.disable_progress_bar()
        yield
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        name = hub_name(model, "model")
        how = f"; where the hub is in reach, fetch it with: {name.command()}" if name else ""
        raise EnvironmentLacks(f"{what} {model}: can't be loaded ({reason}){how}") from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
