"""Code of the user's own, named in the configuration by an import path."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from services.common.errors import UserError
from services.common.loading.what_it_has import called_otherwise, defined_at, lacks, misused
from services.common.names import near_name, nearest

_ROOT = Path(__file__).parents[3]
OWN_PACKAGES = ("services", "trainer", "retriever_service")
"""The names that an installed Unspiral takes at the top level: no project beside it can have them."""
_OURS = tuple(f"{_ROOT / name}{os.sep}" for name in OWN_PACKAGES)
_INSTALLED = tuple(f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("purelib", "platlib"))
_LIBRARIES = (*_INSTALLED, *(f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("stdlib", "platstdlib")))
_RAYS = f"{os.sep}ray{os.sep}_private{os.sep}"
_SHOWN_NAMES = 12
_ABSENT: Any = object()
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


_DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)[./]([A-Za-z_]\w*)")


class NoSuchName(ImportError):
    """A part of an import path names nothing. The line says all, so no kind or place goes with it."""


def is_import_path(text: str) -> bool:
    """Whether it could be the import path of an object, `package.module:name`."""
    return _PATH.fullmatch(text) is not None


def with_colon(text: str) -> str:
    """`; did you mean own.search:search?`, of `own.search.search` where that names a function or class, with
    a dot for the colon of an import path. Empty for any other text."""
    parts = _DOTTED.fullmatch(text)
    if parts is None:
        return ""
    path = f"{parts[1]}:{parts[2]}"
    try:
        _look_here()
        if importlib.util.find_spec(parts[1]) is None or not callable(find(path)):
            return ""
    except (Exception, SystemExit):  # a guess alone; what is wrong with the module is told where it is named
        return ""
    return f"; did you mean {path}?"


def _look_here() -> None:
    """Look in the current folder too, as `python -m trainer` does; the console script does not."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def find(path: str) -> Any:
    """The object at `package.module:name`, looked for where Python looks, and in the current folder. Raises
    NoSuchName, and whatever the module's own code raises, SystemExit too."""
    _look_here()
    module_name, _, attribute = path.partition(":")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # of another module, which this one imports
        raise NoSuchName(f"No module named {error.name!r}{_where_looked(error.name)}") from None
    holder = module_name
    for part in attribute.split("."):
        inner = getattr(found, part, _ABSENT)  # asked for once: a module may make what it is asked for
        if inner is _ABSENT:
            raise NoSuchName(f"{holder} has no `{part}`{_names_in(found, part)}")
        found = inner
        holder = f"{holder}.{part}"
    return found


def _where_looked(missing: str) -> str:
    """The end of a line: the folder of the package that lacks a module, and what it has instead; of one at
    the top level, the places where it was looked for."""
    parent, _, name = missing.rpartition(".")
    if taken := _taken(missing):
        return taken
    if holder := sys.modules.get(parent):
        folders = list(getattr(holder, "__path__", ()))
        if not folders:
            return f": {parent} is one file, {getattr(holder, '__file__', None) or 'of Python itself'}"
        modules = [found.name for found in pkgutil.iter_modules(folders) if found.name != "__main__"]
        near = nearest(name, modules)
        shown = ", ".join(modules[:_SHOWN_NAMES]) + (", ..." if len(modules) > _SHOWN_NAMES else "")
        guess = f"; did you mean {parent}.{near}?" if near else ""
        return f" in {' or '.join(folders)}; it has: {shown or 'no module'}{guess}"
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    more = ", ..." if len(given) > _SHOWN_NAMES else ""
    path = f"PYTHONPATH ({', '.join(given[:_SHOWN_NAMES])}{more})" if given else "PYTHONPATH (not set)"
    return (
        f"; looked in {os.getcwd()} (the current folder), {path} and the installed packages: start in the "
        "folder that holds it, or set PYTHONPATH to that"
    )


def _names_in(holder: Any, wanted: str) -> str:
    """What a module or class of the user's has instead: names of its own first, those it imported never."""
    public = [
        name
        for name, value in getattr(holder, "__dict__", {}).items()
        if not name.startswith("_")
        and callable(value)
        and (not isinstance(holder, ModuleType) or getattr(value, "__module__", "") == holder.__name__)
    ]
    shown = ", ".join(public[:_SHOWN_NAMES]) + (", ..." if len(public) > _SHOWN_NAMES else "")
    return f"; it has: {shown or 'no function or class'}{near_name(wanted, public)}"


def load(key: str, path: str, expected: str, *calls: Call, listed: bool = False) -> Callable[..., Any]:
    """The function or class at an import path. key: of the configuration, for the error; expected: what it
    should be, such as `a function of one trajectory`; calls: as of `check_takes`, where its signature is to
    be checked; listed: the key takes a list, and the error shows it as it is typed. Raises UserError."""
    where = f"{key}=[{path}]" if listed else f"{key}={path}"
    if not is_import_path(path):
        raise UserError(
            f"{where}: expected an import path package.module:name of {expected}{with_colon(path)}"
        )
    with calling(f"{where}: cannot be imported"):
        found = find(path)
    if not callable(found):
        raise UserError(f"{where}: expected {expected}, found {type(found).__name__}")
    for call in calls:
        check_takes(where, expected, found, call)
    return found


@dataclass(frozen=True)
class Call:
    """How a function of the user's is called: the number of its arguments, and the names of those by name."""

    arguments: int
    by_name: tuple[str, ...] = ()
    function: bool = True
    """Whether it must be a function (or an object that is called as one) that is not `async`. Otherwise a
    class will do too."""
    awaited: bool = False
    """Whether a function may be `async` all the same."""


def check_takes(where: str, expected: str, found: Callable[..., Any], call: Call) -> None:
    """That an object of the user's can be called so, by its signature alone: nothing is called. One of C code
    may have no signature, and passes. where, expected: of the error. Raises UserError."""
    if call.function and inspect.isclass(found):
        raise UserError(f"{where}: expected {expected}, found the class {found.__name__}")
    if call.function and not call.awaited and is_async(found):
        raise UserError(f"{where}: is async; expected a plain one: {expected}")
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*range(call.arguments), **dict.fromkeys(call.by_name))
    except TypeError as error:
        name = getattr(found, "__name__", type(found).__name__)
        has = f"{name}({', '.join(signature.parameters)})"
        raise UserError(f"{where}: expected {expected}, found {has}: {error}{defined_at(found)}") from None


def is_async(found: Callable[..., Any]) -> bool:
    """Whether a call of it gives a coroutine."""
    return inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__)


@contextmanager
def calling(where: str, passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Around a call of a user's code, which may raise anything: UserError says where (key and value), and
    what was raised at which line. So it does for `sys.exit`, which would end our process with a status of its
    own, or a worker without a word. passes: errors that are left as they are."""
    try:
        yield
    except passes:
        raise
    except ENDS as error:
        if by_signal(error):
            raise
        raise UserError(f"{where}: {told(error)}") from error
    except Exception as error:
        raise UserError(f"{where}: {told(error)}") from error


ENDS = (SystemExit, KeyboardInterrupt)
"""What ends a program where nothing catches it."""


def is_slip(error: BaseException | None) -> bool:
    """Whether it is a slip in the code, whatever that was given: a name that is nowhere, or that none of our
    objects has."""
    if isinstance(error, NameError | ImportError):
        return True
    return error is not None and bool(
        lacks(error, OWN_PACKAGES) or (isinstance(error, TypeError) and misused(str(error)))
    )


def by_signal(error: BaseException) -> bool:
    """Whether one of ENDS may come from a signal, and not from the user's code. Handlers run in the main
    thread alone: ours raise KeyboardInterrupt there, as Python's own does, and Ray's SystemExit."""
    if threading.current_thread() is not threading.main_thread():
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, KeyboardInterrupt) or bool(frames and _RAYS in frames[-1].filename)


def told(error: BaseException) -> str:
    """Kind and message of an exception in a user's code, in one line, with the user's line that led to it;
    where the user's module is a library's, with its innermost line."""
    if isinstance(error, NoSuchName):
        return str(error)
    message = " ".join((lacks(error, OWN_PACKAGES) or str(error)).split())
    message = f"{type(error).__name__}: {message}".removesuffix(": ")
    if isinstance(error, SyntaxError) and error.filename:  # its text has the file's name without the folder
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    if isinstance(error, SystemExit):
        message = f"it ends the program, by SystemExit({'' if error.code is None else repr(error.code)})"
    elif isinstance(error, ModuleNotFoundError):
        message += _taken(error.name or "")
    elif isinstance(error, TypeError):
        message += misused(message)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_ours(f.filename)]
    users = [f for f in frames if not f.filename.startswith(_LIBRARIES)]
    # Of a user's part that is installed as a library; the machinery of threads and the like is no place.
    users = users or [f for f in frames if f.filename.startswith(_INSTALLED)]
    if users:
        return f"{message} ({users[-1].filename}, line {users[-1].lineno})"
    return message + defined_at(called_otherwise(error))


def _taken(module: str) -> str:
    """What to do where a module was looked for in a package of ours."""
    package = module.partition(".")[0]
    if package not in OWN_PACKAGES:
        return ""
    return f"; `{package}` is a package of Unspiral's: give yours another name"


def _is_ours(file: str) -> bool:
    """Whether it is our own code, made by Python for it, or the machinery of imports: no place in the user's
    code."""
    return file.startswith(("<frozen", "<string>", *_OURS)) or file == importlib.__file__
