"""Tools of an agent beside its search: `rollout.tools` gives each a tag and an import path.

A tool is a function, or a class whose instances keep the state of one trajectory (an environment):

    def calculator(content: str, question: Question) -> str: ...

    class Shop:
        def __init__(self, question: Question) -> None: ...
        def __call__(self, content: str) -> str: ...
        def close(self) -> None: ...        # where there is one: the trajectory has ended

All may be `async`. The policy writes `<NAME>content</NAME>`; what the tool returns is its observation, cut
to `rollout.max_obs_tokens`. A function that is not `async` runs in a thread, so that it holds up no other
trajectory.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol

from services.common.deadlines import within
from services.common.errors import UserError
from services.common.loading.user_code import Call, calling, check_takes, load, told
from services.common.loading.what_it_has import defined_at
from services.common.printing.kinds import returned_kind
from services.common.processes.daemon_threads import DaemonThreads
from services.contracts import Question
from services.rollout.errors import WorkerLostError

log = logging.getLogger(__name__)
_THREADS = DaemonThreads(64, "tools")
"""Of their own: calls that hang must not keep the worker from its weights."""
_CLOSING: set[asyncio.Future[str]] = set()
"""Calls of `close` under way: of a task that nobody holds nothing is left."""


class Tool(Protocol):
    """A tool without state."""

    def __call__(self, content: str, question: Question) -> str | Awaitable[str]:
        """The observation. content: what the policy wrote between the tags, stripped."""


class Environment(Protocol):
    """A tool with the state of one trajectory. Its class is called with the question at the first call of a
    trajectory. Where its object has `close`, that is called without arguments once the trajectory has
    ended."""

    def __call__(self, content: str) -> str | Awaitable[str]:
        """The observation; as of `Tool`."""


MADE_OF = "made of"
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
        self._loop: asyncio.AbstractEventLoop | None = None
        """Of the last call."""
        self._making = threading.Lock()
        self._ended = False
        self._asked: Future[Any] | None = None
        """The last call in a thread."""

    async def call(self, name: str, content: str) -> str:
        """The observation of one call.

        Raises TimeoutError after `timeout_seconds` (the trajectory is then run again), UserError where the
        tool fails or returns no text: an outage never becomes an empty observation. WorkerLostError where
        calls that hang have taken all threads: only another worker has free ones.
        """
        self._asked = None
        self._loop = asyncio.get_running_loop()
        try:
            async with within(self._timeout_seconds, lambda: self._late(name)):
                result = await self._ask(name, content)
        except _Away as away:
            raise TimeoutError(str(away)) from away
        if not isinstance(result, str):
            tool = self._tools[name]
            place = defined_at(tool.__call__ if isinstance(tool, type) else tool)
            raise UserError(f"rollout.tools.{name}: returned {returned_kind(result)}; expected a text{place}")
        return result

    async def close(self, wait: bool = True) -> list[str]:
        """Call `close` of each object that was made, where it has one: once, however the trajectory ended.
        The lines of those that failed or took longer than `timeout_seconds`. They are logged too, and end
        nothing: what the trajectory earned does not depend on them. wait: False only begins the calls."""
        with self._making:
            self._ended = True
            made, self._made = self._made, {}
        closing = [
            asyncio.ensure_future(self._close(name, one)) for name, one in made.items() if _may_close(one)
        ]
        if not closing:
            return []
        _CLOSING.update(closing)
        for task in closing:
            task.add_done_callback(_CLOSING.discard)
        if not wait:
            await asyncio.sleep(0)  # each begins
            return []
        return [line for line in await asyncio.shield(asyncio.gather(*closing)) if line]

    async def _close(self, name: str, made: Any) -> str:
        """The line of what went wrong; "" where nothing did."""
        where = f"rollout.tools.{name}: close, after question {self._question.id}"
        late = f"{where}: no end within rollout.tool_timeout_seconds={self._timeout_seconds:g}"
        asked = None
        try:
            async with within(self._timeout_seconds, lambda: TimeoutError(late)):
                with _calling(where):
                    if not _closes(made):
                        return ""
                    if inspect.iscoroutinefunction(made.close):
                        await made.close()
                    else:
                        asked = _THREADS.submit(partial(copy_context().run, _result, made.close))
                        # Called, whoever still waits; what only passes a coroutine on is awaited too.
                        given = await asyncio.shield(asyncio.wrap_future(asked))
                        if inspect.isawaitable(given):
                            await given
        except (TimeoutError, UserError, _Away) as error:
            if asked is not None and asked.running():
                _THREADS.give_up(asked)
            line = str(error)
        except asyncio.CancelledError:  # of a task that `close` itself has cancelled, or of the end of all
            line = f"{where}: CancelledError, of a task that was cancelled and is awaited"
        else:
            return ""
        log.warning("%s", line)
        return line

    def _make(self, name: str) -> None:
        """An object, in a thread. One that comes when the trajectory has ended is closed at once."""
        made = self._tools[name](self._question)
        with self._making:
            if not self._ended:
                self._made[name] = made
                return
        with suppress(Exception):
            if _closes(made):
                self._close_late(made)

    def _close_late(self, made: Any) -> None:
        """In the thread that made it; an `async` one on the loop of the calls."""
        if inspect.iscoroutinefunction(made.close) and self._loop is not None:
            asyncio.run_coroutine_threadsafe(made.close(), self._loop)
        elif inspect.iscoroutine(given := made.close()) and self._loop is not None:
            asyncio.run_coroutine_threadsafe(given, self._loop)

    def _late(self, name: str) -> Exception:
        """Whether the tool was slow, or its call found no thread."""
        key, limit = f"rollout.tools.{name}", f"within rollout.tool_timeout_seconds={self._timeout_seconds:g}"
        if self._asked is None or not self._asked.cancelled():
            return TimeoutError(f"{key}: no result {limit}")
        most, hanging = _THREADS.most, _THREADS.hanging
        if hanging >= most:
            return WorkerLostError(
                f"{key}: not called {limit}: {hanging} earlier calls of tools hang and hold all threads of "
                "the worker; give what a tool waits for a limit of its own"
            )
        return TimeoutError(
            f"{key}: not called {limit}: a worker calls {most} tools at a time, of which {hanging} are past "
            "this limit; an `async` tool needs no thread"
        )

    async def _ask(self, name: str, content: str) -> object:
        tool = self._tools[name]
        key, question = f"rollout.tools.{name}", f"question {self._question.id}"
        if inspect.isclass(tool) and name not in self._made:
            with _calling(f"{key}: {MADE_OF} {question}"):
                await self._called(partial(self._make, name))
        with _calling(f"{key}: on {question}"):
            if inspect.isclass(tool):
                return await self._called(self._made[name], content)
            return await self._called(tool, content, self._question)

    async def _called(self, function: Any, *arguments: object) -> Any:
        """The result of a user's function: awaited where it is `async`, otherwise made in a thread."""
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            self._asked = None
            return await function(*arguments)
        call = partial(copy_context().run, _result, function, *arguments)
        self._asked = _THREADS.submit(call)
        try:
            return await asyncio.wrap_future(self._asked)
        except asyncio.CancelledError:
            _THREADS.give_up(self._asked)
            raise


def _closes(made: object) -> bool:
    return callable(getattr(made, "close", None))


def _may_close(made: object) -> bool:
    """As `_closes`, but a look that raises, in a `__getattr__` or a property, is left to `_close` to tell."""
    try:
        return _closes(made)
    except Exception:
        return True


class _Away(Exception):
    """A tool's own TimeoutError, of a service that it asks, which is none of ours."""


@contextmanager
def _calling(where: str) -> Iterator[None]:
    with calling(where, passes=(_Away,)):
        try:
            yield
        except (TimeoutError, _Away) as error:
            raise _Away(f"{where}: {error if isinstance(error, _Away) else told(error)}") from error


def _result(function: Any, *arguments: object) -> Any:
    """A future takes no StopIteration, of a bare `next`: whoever awaits it would wait for ever. Of a
    TimeoutError it gives on another one, without its place."""
    try:
        return function(*arguments)
    except TimeoutError as error:
        raise _Away(told(error)) from error
    except StopIteration as error:
        raise RuntimeError("StopIteration, of a `next` that found nothing").with_traceback(
            error.__traceback__
        ) from None
