"""Paths in a configuration: they are relative to the current folder, and a line about one that is not there
says so where the configuration lies in another folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from services.common import hub
from services.common.errors import UnspiralError
from services.common.loading.user_code import is_import_path
from trainer.config.schema import Config
from trainer.data import models


def paths_of(config: Config) -> dict[str, str]:
    """Models, files and folders that a configuration names, by key: paths, and names that stand for some."""
    named = {"model.path": config.model.path, "data.train": config.data.train, "data.eval": config.data.eval}
    both = {"retriever": config.retriever, "evaluation.retriever": config.evaluation.retriever}
    for key, settings in both.items():
        if settings is not None:
            named[f"{key}.corpus"] = settings.corpus
            named[f"{key}.index"] = None if is_import_path(settings.index or "") else settings.index
    return {key: value for key, value in named.items() if value}


def where_looked(file: Path, values: Iterable[str]) -> str:
    """What follows `no such file`, of paths that are not there: `; paths are relative to ...`, and those that
    lie beside the configuration. Empty where that is in the current folder itself."""
    folder = file.absolute().parent
    relative = [value for value in values if not Path(value).expanduser().is_absolute()]
    if not relative or folder.resolve() == Path.cwd().resolve():
        return ""
    beside = [os.path.normpath(folder / value) for value in relative if (folder / value).exists()]
    there = f"; beside the configuration: {', '.join(beside)}" if beside else ""
    return f"; paths are relative to the current folder, {Path.cwd()}{there}"


@contextmanager
def looked_for(file: Path, config: Config) -> Iterator[None]:
    """Inside, an error that names paths of the configuration in `file` that are not there says where they
    were looked for."""
    try:
        yield
    except UnspiralError as error:
        line = str(error)
        absent = [value for value in paths_of(config).values() if _names(line, value) and _is_absent(value)]
        if hint := where_looked(file, absent):
            error.args = (line + hint, *error.args[1:])
        raise


def _names(line: str, path: str) -> bool:
    return re.search(rf"(?<![\w./-]){re.escape(path)}(?=[:;,) ]|$)", line) is not None


def _is_absent(value: str) -> bool:
    """Of ORG/NAME the hub was asked because there is no such folder."""
    maybe_path = not models.is_there(value) or (models.on_hub(value) and not value.startswith(hub.PREFIX))
    return maybe_path and not Path(value).expanduser().exists()
