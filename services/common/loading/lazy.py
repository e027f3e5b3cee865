"""Modules that are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Stands for the module `name`, and imports it when one of its names is read.

    For a command line, whose `--help` must not wait for FastAPI, numba or torch. Declare it beside a
    `TYPE_CHECKING` import of the same module, so that mypy and import-linter see the module itself:

        if TYPE_CHECKING:
            from services.control import gateway
        else:
            gateway = LazyModule("services.control.gateway")
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # `copy` and `pickle` ask an object that has no `_name` yet, which would end in this method again.
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
