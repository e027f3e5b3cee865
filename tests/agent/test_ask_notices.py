"""What the environment says between two turns where nothing was searched, such as the template's hint after
an invalid one, stands on the page, in the interface and on the terminal alike; so does a start anew."""

from __future__ import annotations

import asyncio
import io

import chromium
import httpx
import pytest
from agent_world import NAME, StillAgent
from chromium import CHROMIUM, browser  # noqa: F401
from playwright.sync_api import expect
from rich.console import Console

from services.agent.launch import serve_in_thread
from services.contracts import Action, Observation, Question, Trajectory
from services.rollout.worker.watching import Observed, Restarted, Writing
from trainer.commands.agent.transcript import Transcript

HINT = "My previous action is invalid. Use <search> or <answer>."
ANEW = "a log-prob was not finite: once more from the start"
BAD = "<think> hm </think>"
LAST = "<answer> Shakespeare </answer>"
ASKED = {"model": NAME, "messages": [{"role": "user", "content": "who?"}]}


class InvalidAgent(StillAgent):
    """Begins anew, writes an invalid turn, and then answers."""

    async def _answer(self, question, watch):
        for event in (Writing("<think> lost"), Restarted(), Writing(BAD), Observed(f"\n{HINT}\n")):
            watch(event)
        watch(Writing("<answer>"))
        if self.hold is not None:
            await self.hold.wait()
        watch(Writing(LAST))
        segments = [
            Action([1], [-1.0], 0, "invalid", BAD),
            Observation([2, 3], f"\n{HINT}\n"),
            Action([6], [-0.125], 0, "answer", LAST),
        ]
        return Trajectory("u", "u", Question("q", question, (), "ask"), [7], segments, "answer", seconds=1.0)


@pytest.fixture(scope="module")
def service():
    agent = InvalidAgent()
    with serve_in_thread(agent, NAME) as running:
        yield agent, running.url


def test_a_completion_has_what_was_observed_after_each_turn_without_a_search(service):
    answer = httpx.post(f"{service[1]}/v1/chat/completions", json=ASKED, trust_env=False).json()
    assert answer["unspiral"]["turns"] == [
        {"kind": "invalid", "tokens": 1, "searches": 0, "observed": f"\n{HINT}\n"},
        {"kind": "answer", "tokens": 1, "searches": 0},
    ]
    assert answer["choices"][0]["message"]["reasoning_content"] == BAD + "\n"


async def test_the_terminal_has_them():
    out = io.StringIO()
    transcript = Transcript(Console(file=out, width=110))
    transcript.end(await InvalidAgent().ask("who?", transcript.tell))
    assert HINT in out.getvalue() and ANEW in out.getvalue()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1440, 390])
def test_the_page_has_them_while_it_writes_and_at_the_end(service, browser, width):
    agent, url = service
    agent.reset()
    agent.hold = asyncio.Event()
    page = chromium.opened(browser, f"{url}/?q=who%3F", width, ours=url)
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#turns .said")).to_have_text([ANEW, HINT])
    expect(page.locator("#turns .written")).to_have_text(["<think> lost", BAD])
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#answer")).to_have_text("no answer")
    expect(page.locator("#turns .said")).to_have_text([ANEW, HINT])  # what came is still there
    agent.hold = None
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#answer")).to_have_text("Shakespeare")
    expect(page.locator("#turns > li")).to_have_count(2)
    expect(page.locator("#turns > li").first.locator(".said")).to_have_text(HINT)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    chromium.closed_well(page)
