"""`close` of an environment's object: once, however its trajectory ended, and bounded."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import ClassVar

import httpx
import pytest
from places import ROOT
from rollout_fakes import ScriptedEngine, request, words

from services.common.errors import UserError
from services.contracts import Question
from services.rollout.worker.loop import run_trajectory
from services.rollout.worker.templates import make_template
from services.rollout.worker.tools import Toolbox, load_tools
from services.settings import RolloutSettings

QUESTION = Question("q1", "where is n1 ?", ("n21",), "made")
MORE = ("<box>", "</box>", "ok")


class Box:
    """Notes what is done with each of its objects."""

    notes: ClassVar[list[str]] = []

    def __init__(self, question):
        self.notes.append("made")

    def __call__(self, content):
        if content == "n2":
            raise ValueError("n2")
        return "ok"

    def close(self):
        self.notes.append("closed")


class Slow(Box):
    async def __call__(self, content):
        await asyncio.Event().wait()

    async def close(self):
        self.notes.append("closed")


@pytest.fixture(autouse=True)
def notes():
    Box.notes = []
    yield Box.notes


def trajectory_of(texts, tool=Box, **settings):
    given = RolloutSettings(tools={"box": "a:b"}, **settings)
    tokenizer = words(more=MORE)
    template = make_template("examples.extend.template:Brief", tokenizer, given)

    async def search(query):
        return []

    return run_trajectory(
        request(),
        engine=ScriptedEngine(tokenizer, texts),
        template=template,
        search=search,
        settings=given,
        tools={"box": tool},
    )


@pytest.mark.parametrize(
    "texts",
    [
        ["<box> n1 </box>", "<box> n3 </box>", "<answer> n1 </answer>"],
        ["<box> n1 </box>", "n1", "n1"],
    ],
)
def test_an_object_is_closed_once_where_the_trajectory_answered_or_not(notes, texts):
    asyncio.run(trajectory_of(texts, max_turns=2))
    assert notes == ["made", "closed"]


def test_a_trajectory_without_a_call_makes_and_closes_nothing(notes):
    asyncio.run(trajectory_of(["<answer> n1 </answer>"]))
    assert notes == []


def test_an_object_whose_call_raises_is_closed(notes):
    with pytest.raises(UserError, match=r"rollout.tools.box: on question .*ValueError: n2"):
        asyncio.run(trajectory_of(["<box> n2 </box>", "<answer> n1 </answer>"]))
    assert notes == ["made", "closed"]


def test_an_object_whose_call_takes_too_long_is_closed(notes):
    with pytest.raises(TimeoutError, match=r"rollout.tool_timeout_seconds=0.05"):
        asyncio.run(trajectory_of(["<box> n1 </box>"], Slow, tool_timeout_seconds=0.05))
    assert notes == ["made", "closed"]


def test_a_trajectory_that_is_cancelled_closes_its_object(notes):
    begun = asyncio.Event()

    class Waits(Slow):
        async def __call__(self, content):
            begun.set()
            await asyncio.Event().wait()

    async def run():
        task = asyncio.create_task(trajectory_of(["<box> n1 </box>"], Waits))
        await asyncio.wait_for(begun.wait(), 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert notes == ["made", "closed"]


def test_a_close_in_a_thread_is_called_though_the_trajectory_was_cancelled(notes):
    begun, closed, ends = threading.Event(), threading.Event(), threading.Event()

    class Hangs(Box):
        def __call__(self, content):
            begun.set()
            ends.wait(60)

        def close(self):  # it ends the call that hangs
            super().close()
            ends.set()
            closed.set()

    async def run():
        task = asyncio.create_task(trajectory_of(["<box> n1 </box>"], Hangs))
        assert await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert closed.wait(30) and notes == ["made", "closed"]


def test_an_object_that_comes_too_late_is_closed_when_it_comes(notes):
    goes_on, closed = threading.Event(), threading.Event()

    class Late(Box):
        def __init__(self, question):
            goes_on.wait(60)
            super().__init__(question)

        def close(self):
            super().close()
            closed.set()

    with pytest.raises(TimeoutError):
        asyncio.run(trajectory_of(["<box> n1 </box>"], Late, tool_timeout_seconds=0.05))
    assert notes == []
    goes_on.set()
    assert closed.wait(30) and notes == ["made", "closed"]


class Raises(Box):
    def close(self):
        raise ConnectionError("no server")


class Looks(Box):
    @property
    def close(self):
        raise ConnectionError("no server")


class Passes(Box):
    """As `return self.session.close()` of an `async` client does."""

    def close(self):
        async def closes():
            raise ConnectionError("no server")

        return closes()


class Stays(Box):
    async def close(self):
        await asyncio.Event().wait()


class Cancels(Box):
    async def close(self):
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        await task


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        (Cancels, "rollout.tools.box: close, after question q1: CancelledError, of a task that was "),
        (Raises, "rollout.tools.box: close, after question q1: ConnectionError: no server ("),
        (Looks, "rollout.tools.box: close, after question q1: ConnectionError: no server ("),
        (Passes, "rollout.tools.box: close, after question q1: ConnectionError: no server ("),
        (
            Stays,
            "rollout.tools.box: close, after question q1: no end within rollout.tool_timeout_seconds=0.05",
        ),
    ],
)
def test_a_close_that_fails_or_hangs_costs_no_trajectory_and_is_logged(tool, says, caplog):
    async def run():
        box = Toolbox({"box": tool}, QUESTION, 0.05)
        box._timeout_seconds = 60.0
        assert await box.call("box", "n1") == "ok"
        box._timeout_seconds = 0.05 if tool is Stays else 60.0
        first = await box.close()
        assert await box.close() == [], "once"
        return first

    (line,) = asyncio.run(run())
    assert line.startswith(says)
    assert [record.getMessage() for record in caplog.records] == [line]
    if tool is not Stays:
        done = asyncio.run(trajectory_of(["<box> n1 </box>", "<answer> n1 </answer>"], tool))
        assert done.finish == "answer"


def test_the_sandbox_on_the_page_makes_its_session_and_gives_it_back(monkeypatch):

    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n([^`]*class Sandbox.+?)^```", page, re.M | re.S)
    exec(code, own := {"__name__": "own_sandbox"})
    asked = []

    def answers(call):
        asked.append(f"{call.method} {call.url.path}")
        return httpx.Response(200, json={"id": "s1", "output": "4"})

    own["SERVER"] = httpx.AsyncClient(transport=httpx.MockTransport(answers), base_url="http://made")

    async def run():
        box = Toolbox({"python": own["Sandbox"]}, QUESTION, 60)
        assert [await box.call("python", "2 + 2"), await box.call("python", "4")] == ["4", "4"]
        assert await box.close() == []

    asyncio.run(run())
    assert asked == [
        "POST /sessions",
        "POST /sessions/s1/run",
        "POST /sessions/s1/run",
        "DELETE /sessions/s1",
    ]
    assert load_tools({"guess": "examples.extend.environment:Guessing"})
