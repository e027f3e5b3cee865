"""Code of the user's own, named in the configuration by an import path."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def find(path: str) -> Any:
    """The object at `package.module:name`, looked for where Python looks, and in the current folder. Raises
    whatever the module's own code raises; ImportError where that ends the program."""
    if (
        os.getcwd() not in sys.path and "" not in sys.path
    ):  # as `python -m trainer` has it; the console script has not
        sys.path.append(os.getcwd())
    module_name, _, attribute = path.partition(":")
    try:
        found = importlib.import_module(module_name)
    except SystemExit as e:  # a script without a guard, which would end our command with its own status
        raise ImportError(f"{module_name} ends the program when it is imported") from e
    for part in attribute.split("."):
        found = getattr(found, part)
    return found
