"""Code of the user's own, named in the configuration by an import path."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def find(path: str) -> Any:
    """The object at `package.module:name`, looked for where Python looks, and in the current folder. Raises whatever the module's own code raises."""
    if (
        os.getcwd() not in sys.path and "" not in sys.path
    ):  # as `python -m trainer` has it; the console script has not
        sys.path.append(os.getcwd())
    module_name, _, attribute = path.partition(":")
    found = importlib.import_module(module_name)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found
