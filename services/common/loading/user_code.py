"""Code of the user's own, named in the configuration by an import path."""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from services.common.errors import UserError

_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_import_path(text: str) -> bool:
    """Whether it could be the import path of an object, `package.module:name`."""
    return _PATH.fullmatch(text) is not None


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


def load(key: str, path: str, expected: str) -> Callable[..., Any]:
    """The function or class at an import path. key: of the configuration, for the error; expected: what it
    should be, such as `a function of one trajectory`. Raises UserError."""
    if not is_import_path(path):
        raise UserError(f"{key}={path}: expected an import path package.module:name of {expected}")
    with calling(f"{key}={path}: cannot be imported"):
        found = find(path)
    if not callable(found):
        raise UserError(f"{key}={path}: expected {expected}, found {type(found).__name__}")
    return found


@contextmanager
def calling(where: str, passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Around a call of a user's code, which may raise anything: UserError says where (key and value), and
    what was raised at which line. passes: errors that are left as they are."""
    try:
        yield
    except passes:
        raise
    except Exception as error:
        raise UserError(f"{where}: {told(error)}") from error


def told(error: Exception) -> str:
    """Kind, message and innermost place of an exception in a user's code, in one line."""
    message = f"{type(error).__name__}: {' '.join(str(error).split())}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_import(f.filename)]
    return f"{message} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else message


def _is_import(file: str) -> bool:
    """Whether it is Python's own machinery of imports, or ours: no place in the user's code."""
    return file.startswith("<frozen importlib") or file in (importlib.__file__, __file__)
