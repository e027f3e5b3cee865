"""What an object of ours has, for a user's code that asked it for something else; and the place of a function
of the user's that was called with other arguments than it takes."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from services.common.names import nearest

MEANT = {
    "Trajectory": {
        "answer": "trainer.rewards.final_answer(trajectory)",
        "completion": "model_text",
        "documents": "actions, each with its documents",
        "golden_answers": "question.golden_answers",
        "observations": "segments",
        "output": "model_text",
        "prompt": "question.text",
        "queries": "actions, each with its query",
        "query": "actions, each with its query",
        "response": "model_text",
        "reward": "the argument `rewards` of a metric",
        "solution_str": "model_text",
        "steps": "actions",
        "text": "model_text",
        "tool_calls": "actions, whose kind is then `tool`",
        "turns": "actions",
    },
    "Question": {
        "answer": "golden_answers",
        "answers": "golden_answers",
        "extra": "columns",
        "extra_info": 'columns["extra_info"]',
        "fields": "columns",
        "ground_truth": "golden_answers",
        "metadata": 'columns["metadata"]',
        "question": "text",
        "row": "columns",
        "supporting_facts": 'columns["supporting_facts"]',
        "target": "golden_answers",
    },
    "Action": {"content": "query", "documents_ids": "document_ids", "hits": "documents", "type": "kind"},
    "Observation": {
        name: "trajectory.actions, which holds no observations"
        for name in ("document_ids", "documents", "kind", "logprobs", "policy_version", "query", "tool")
    },
    "Hit": {
        "content": "contents",
        "passage": "contents",
        "text": "contents",
        "title": "contents, whose first line is the title",
    },
}
"""Names that a user may know from other libraries, and what they are here."""
_FEWEST_LETTERS = 4
_MOST_NAMES = 24
"""Of more, the nearest alone is told."""
_MISUSED = re.compile(
    r"'(\w+)'(?: object)? (?:is not (?:subscriptable|callable|(?:a container or )?iterable)|"
    r"does not support item \w+|has no len\(\))$"
)
_IMPORTED = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")
_CALLED = re.compile(r"([\w.<>]+)\(\) (?:takes|missing|got) ")


def lacks(error: BaseException, packages: tuple[str, ...]) -> str:
    """What an AttributeError of an object, a class or a module of ours says in place of Python's own message,
    and an import from such a module; "" of any other error. packages: ours, at the top level."""
    if isinstance(error, ImportError) and (imported := _IMPORTED.match(str(error))):
        return _of_module(sys.modules.get(imported[2]), imported[1], packages)
    if not isinstance(error, AttributeError) or not error.name:
        return ""
    asked, wanted = error.obj, error.name
    if isinstance(asked, ModuleType):
        return _of_module(asked, wanted, packages)
    cls = asked if isinstance(asked, type) else type(asked)
    if not (ours := _of_ours(cls, packages)):
        return ""
    has = members(asked if asked is not cls else cls, ours)
    meant = next((MEANT[base.__name__] for base in ours if base.__name__ in MEANT), {})
    return _line(cls.__name__, wanted, has, meant)


def misused(message: str) -> str:
    """What follows a TypeError of an object of ours that was taken for a dictionary."""
    found = _MISUSED.search(message)
    if not found or found[1] not in MEANT:
        return ""
    name = found[1].lower()
    field = {"trajectory": "model_text", "hit": "contents"}.get(name, "text")
    return f"; what it has are attributes, such as `{name}.{field}`"


def members(asked: Any, ours: list[type]) -> list[str]:
    """The public names of an object: fields, then properties and methods."""
    names = [name for name in getattr(asked, "__dict__", {}) if not isinstance(asked, type)]
    for base in ours:
        names += getattr(base, "__dataclass_fields__", {})
        names += getattr(base, "__annotations__", {})
        names += [name for name, value in vars(base).items() if callable(value) or _is_property(value)]
    return list(dict.fromkeys(name for name in names if not name.startswith("_")))


def defined_at(function: Any) -> str:
    """` (FILE, line N)` of a function or class in Python; "" of any other."""
    try:
        plain = inspect.unwrap(function)
        if not inspect.isclass(plain) and not hasattr(plain, "__code__") and not hasattr(plain, "__func__"):
            plain = type(plain).__call__
        code = getattr(plain, "__code__", None)
        if code is not None:
            return f" ({code.co_filename}, line {code.co_firstlineno})"
        file = inspect.getsourcefile(plain)
        return f" ({file}, line {inspect.getsourcelines(plain)[1]})" if file else ""
    except (TypeError, OSError, ValueError):
        return ""


def called_otherwise(error: BaseException) -> Callable[..., Any] | None:
    """The function that our code called with arguments which it does not take: Python says its name alone."""
    found = _CALLED.match(str(error))
    if not isinstance(error, TypeError) or not found or error.__traceback__ is None:
        return None
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    here = list(last.tb_frame.f_locals.values())
    name = found[1].rpartition(".")[2]
    here += [getattr(type(one), name, None) for one in here]
    return next((one for one in here if getattr(one, "__qualname__", None) == found[1]), None)


def _of_module(module: ModuleType | None, wanted: str, packages: tuple[str, ...]) -> str:
    if module is None or module.__name__.partition(".")[0] not in packages:
        return ""
    own = (name for name, value in vars(module).items() if _is_own(module, name, value))
    return _line(module.__name__, wanted, list(dict.fromkeys([*own, *getattr(module, "__all__", ())])))


def _line(holder: str, wanted: str, has: list[str], meant: dict[str, str] | None = None) -> str:
    near = (meant or {}).get(wanted) or nearest(wanted, has) or _of_the_same_word(wanted, has)
    guess = f"; did you mean {near}?" if near else ""
    if guess and len(has) > _MOST_NAMES:
        return f"{holder} has no `{wanted}`{guess}"
    return f"{holder} has no `{wanted}`; it has: {', '.join(has) or 'nothing'}{guess}"


def _of_the_same_word(wanted: str, has: list[str]) -> str | None:
    """The one name that begins as a word of the wanted one: `searches` for `search_count`, or for
    `num_searches`."""
    words = [word for word in wanted.lower().split("_") if len(word) >= _FEWEST_LETTERS]
    found = [name for name in has if any(name.startswith(word) or word.startswith(name) for word in words)]
    return found[0] if len(found) == 1 else None


def _of_ours(cls: type, packages: tuple[str, ...]) -> list[type]:
    """The class and its bases, as far as they are ours."""
    return [base for base in cls.__mro__ if base.__module__.partition(".")[0] in packages]


def _is_own(module: ModuleType, name: str, value: Any) -> bool:
    own = getattr(value, "__module__", module.__name__) == module.__name__
    return not name.startswith("_") and own and not isinstance(value, ModuleType)


def _is_property(value: Any) -> bool:
    return isinstance(value, property | staticmethod | classmethod)
