"""Files and folders that the configuration names."""

from __future__ import annotations

from pathlib import Path

from services.common import hub
from services.common.errors import UserError
from services.common.names import near_path
from trainer.config.schema import Config
from trainer.data import models
from trainer.data.demonstrations import read_demonstrations
from trainer.data.named_columns import questions_in
from trainer.data.relative_paths import paths_of
from trainer.loop.update.matched_step import read_series

LOOKED_AT = 100
"""Rows at the start of a question file that are read before anything slow starts."""


def check_named_files(config: Config) -> None:
    """What a run is to read, before its folder is made; what is on the hub is fetched. Raises UserError: one
    line with the key of each file and folder that is not there; EnvironmentLacks where the hub is out of
    reach."""
    named = paths_of(config)
    missing = [f"{key}: {value}" for key, value in named.items() if not _is_there(key, value)]
    if len(missing) == 1 and missing[0].startswith("model.path: "):
        models.resolve(config.model.path)  # it says what a model may be
    if missing:
        hint = near_path(named[missing[0].partition(": ")[0]]) if len(missing) == 1 else ""
        raise UserError(f"{'; '.join(missing)}: no such file or folder{hint}")
    for key, value in named.items():
        if models.on_hub(value) and not key.endswith(("model.path", ".index")):
            hub.local_file(key, value, models.aside)
    if models.on_hub(config.model.path):
        models.check_trainable(models.resolve(config.model.path), config.model.path)
    if not config.data.skip_bad:
        for file in (config.data.train, config.data.eval):
            if file and Path(file).exists():
                questions_in(config.data, file, first=LOOKED_AT)


def _is_there(key: str, value: str) -> bool:
    return Path(value).expanduser().exists() if key.endswith(".index") else models.is_there(value)


def check_learner_files(config: Config) -> None:
    """Raises UserError where a file that the update needs is not there, or malformed."""
    if config.learner.match_kl:
        read_series(config.learner.match_kl)
    if config.algorithm.supervised.every and config.algorithm.supervised.data:
        read_demonstrations(config.algorithm.supervised.data)
