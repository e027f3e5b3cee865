"""Tools of an agent beside its search: `rollout.tools` gives each a tag and an import path.

A tool is a function, or a class whose instances keep the state of one trajectory (an environment):

    def calculator(content: str, question: Question) -> str: ...

    class Shop:
        def __init__(self, question: Question) -> None: ...
        def __call__(self, content: str) -> str: ...

Both may be `async`. The policy writes `<NAME>content</NAME>`; what the tool returns is its observation, cut
to `rollout.max_obs_tokens`. A function that is not `async` runs in a thread, so that it holds up no other
trajectory.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol

from services.common.deadlines import within
from services.common.errors import UserError
from services.common.loading.user_code import Call, calling, check_takes, load
from services.common.printing.kinds import kind_of
from services.common.processes.daemon_threads import DaemonThreads
from services.contracts import Question

_THREADS = DaemonThreads(64, "tools")
"""Of their own: calls that hang must not keep the worker from its weights."""


class Tool(Protocol):
    """A tool without state."""

    def __call__(self, content: str, question: Question) -> str | Awaitable[str]:
        """The observation. content: what the policy wrote between the tags, stripped."""


class Environment(Protocol):
    """A tool with the state of one trajectory. Its class is called with the question when the trajectory
    begins."""

    def __call__(self, content: str) -> str | Awaitable[str]:
        """The observation; as of `Tool`."""


EXPECTED = "a tool: a function of content and question, or a class that is made from a question"


def load_tools(paths: Mapping[str, str]) -> dict[str, Callable[..., object]]:
    """The functions and classes of `rollout.tools`, by tag. Raises UserError, one line with the key."""
    return {name: _tool(f"rollout.tools.{name}", path) for name, path in paths.items()}


def _tool(key: str, path: str) -> Callable[..., object]:
    found = load(key, path, EXPECTED)
    where = f"{key}={path}"
    check_takes(where, EXPECTED, found, Call(1 if isinstance(found, type) else 2, function=False))
    if isinstance(found, type):
        # Not `getattr`, which finds that of `type`: the call that makes an object.
        call = next(
            (base.__dict__["__call__"] for base in found.__mro__ if "__call__" in base.__dict__), None
        )
        expected = "a class whose objects are called with the content"
        if call is None:
            raise UserError(f"{where}: expected {expected}, found {found.__name__} without __call__")
        if inspect.isfunction(call):  # of the object itself and the content
            check_takes(where, expected, call, Call(2, function=False))
    return found


class Toolbox:
    """The tools of one trajectory. Where a class of the user's cannot be made, the first call says so."""

    def __init__(
        self, tools: Mapping[str, Callable[..., object]], question: Question, timeout_seconds: float
    ) -> None:
        self._tools = tools
        self._question = question
        self._timeout_seconds = timeout_seconds
        self._made: dict[str, object] = {}

    async def call(self, name: str, content: str) -> str:
        """The observation of one call.

        Raises TimeoutError after `timeout_seconds` (the trajectory is then run again), UserError where the
        tool fails or returns no text: an outage never becomes an empty observation.
        """
        limit = self._timeout_seconds
        late = f"rollout.tools.{name}: no result within rollout.tool_timeout_seconds={limit:g}"
        where = f"rollout.tools.{name}: on question {self._question.id}"
        async with within(limit, lambda: TimeoutError(late)):
            with calling(where, passes=(TimeoutError,)):
                result = await self._ask(name, content)
        if not isinstance(result, str):
            raise UserError(f"rollout.tools.{name}: returned {kind_of(result)}; expected a text")
        return result

    async def _ask(self, name: str, content: str) -> object:
        tool = self._tools[name]
        if not inspect.isclass(tool):
            return await _called(tool, content, self._question)
        if name not in self._made:
            self._made[name] = await _called(tool, self._question)
        return await _called(self._made[name], content)


async def _called(function: Any, *arguments: object) -> Any:
    """The result of a user's function: awaited where it is `async`, otherwise made in a thread."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return await function(*arguments)
    call = partial(copy_context().run, function, *arguments)
    return await asyncio.wrap_future(_THREADS.submit(call))
