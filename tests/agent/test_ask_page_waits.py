"""A question that the service cannot take now waits on the page, and is asked once it can be: while the model
loads, while the service is away or another one comes in its place, and while too many ask."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import closing, contextmanager

import chromium
import pytest
from agent_world import NAME, StillAgent
from chromium import CHROMIUM, browser  # noqa: F401
from playwright.sync_api import expect

from services.agent.server import ServiceLimits, create_app
from services.common.http.connections import Limits
from services.common.http.serving import Manner, bind, run_in_thread

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
QUESTION = "who wrote Hamlet?"
LOADING = "The model is loading."
GONE = "The service does not answer."
INVITES = " A question asked now waits, and is asked as soon as it can be."
HELD = " Your question waits, and is asked as soon as it can be."


class SlowAgent(StillAgent):
    """Loads until `loaded` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = threading.Event()
        self.at_hand = threading.Event()
        """Set once a question has come."""

    async def start(self) -> None:
        while not self.loaded.is_set():
            await asyncio.sleep(0.01)

    async def _answer(self, question, watch):
        self.at_hand.set()
        return await super()._answer(question, watch)


@contextmanager
def served(agent, port=0, name=NAME, limits=None):
    """A service, which may still load."""

    def assembled(parts):
        sock = parts.enter_context(closing(bind("127.0.0.1", port, "agent")))
        return create_app(agent, name, None, limits), sock

    manner = Manner(Limits(connections=50), drain_seconds=0.2, lifespan="on")
    with run_in_thread(assembled, "127.0.0.1", "agent", 60.0, manner) as running:
        yield running


def port_of(url):
    return int(url.rpartition(":")[2])


@pytest.fixture
def opened(browser):
    pages = []

    def open_at(url, width=1440):
        pages.append(chromium.opened(browser, url, width, ours=url.partition("?")[0]))
        return pages[-1]

    yield open_at
    for page in pages:
        chromium.closed_well(page)


def ask(page, question=QUESTION):
    page.get_by_label("Question").fill(question)
    page.get_by_role("button", name="Ask").click()


@pytest.mark.parametrize("width", [1440, 390])
def test_a_question_asked_while_the_model_loads_is_answered_once_it_has_loaded(opened, width):
    agent = SlowAgent()
    with served(agent) as running:
        page = opened(running.url, width)
        notice, state = page.locator("#service"), page.locator("#state")
        expect(notice).to_have_text(LOADING + INVITES)
        expect(notice).to_have_role("status")
        ask(page)
        expect(notice).to_have_text(LOADING + HELD)
        expect(state).to_be_empty()
        expect(page.locator("#result")).to_be_hidden()
        assert agent.asked == []
        agent.loaded.set()
        expect(page.locator("#answer")).to_have_text("Shakespeare")
        expect(notice).to_be_hidden()
        expect(state).to_be_empty()
        expect(page.get_by_role("button", name="Stop")).to_be_hidden()
        assert agent.asked == [(QUESTION, 0.0, None)]


def test_a_held_question_can_be_stopped_or_replaced(opened):
    agent = SlowAgent()
    with served(agent) as running:
        page = opened(running.url)
        ask(page)
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#state")).to_have_text("Stopped.")
        expect(page.locator("#service")).to_have_text(LOADING + INVITES)
        ask(page, "first?")
        expect(page.locator("#service")).to_have_text(LOADING + HELD)
        ask(page, "second?")
        page.get_by_role("button", name="Ask").click()  # the same once more changes nothing
        agent.loaded.set()
        expect(page.locator("#answer")).to_have_text("Shakespeare")
        assert agent.asked == [("second?", 0.0, None)]


def test_the_page_tells_that_the_service_is_away_and_that_it_is_back_under_another_name(opened):
    first, second = StillAgent(), StillAgent()
    with served(first) as running:
        page = opened(running.url)
        expect(page).to_have_title(f"Ask {NAME}")
        ask(page)
        expect(page.locator("#answer")).to_have_text("Shakespeare")
        port = port_of(running.url)
    ask(page, "and Faust?")
    expect(page.locator("#service")).to_have_text(GONE + HELD)
    expect(page.locator("#service")).to_have_class("gone")
    expect(page.locator("#result")).to_be_hidden()
    with served(second, port, "other/step_000002"):
        expect(page.locator("#answer")).to_have_text("Shakespeare")
        expect(page.locator("#service")).to_be_hidden()
        expect(page).to_have_title("Ask other/step_000002")
        assert second.asked == [("and Faust?", 0.0, None)]


def test_a_tab_that_nobody_used_meanwhile_asks_the_model_that_is_served_now(opened):
    with served(StillAgent()) as running:
        page = opened(running.url)
        expect(page).to_have_title(f"Ask {NAME}")
        port = port_of(running.url)
    with served(StillAgent(), port, "other"):  # within the time between two looks
        ask(page)
        expect(page.locator("#answer")).to_have_text("Shakespeare")
        expect(page).to_have_title("Ask other")


def test_an_answer_that_breaks_off_is_asked_for_once_more_and_not_for_ever(opened):
    agents = [SlowAgent() for _ in range(2)]
    for agent in agents:
        agent.loaded.set()
        agent.hold = asyncio.Event()  # writes, and never ends
    port = 0
    page = None
    for agent in agents:
        with served(agent, port) as running:
            port = port_of(running.url)
            if page is None:
                page = opened(running.url)
                ask(page)
            assert agent.at_hand.wait(30)
            expect(page.locator("#turns .written")).to_contain_text("<think>")
        if agent is agents[0]:
            expect(page.locator("#service")).to_have_text(GONE + HELD)
            expect(page.locator("#answer")).to_have_text("no answer")
    expect(page.locator("#state")).to_have_text("The service went away while it wrote.")
    expect(page.locator("#state")).to_have_class("error")
    expect(page.locator("#answer")).to_have_text("no answer")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()


def test_an_answer_that_the_page_cannot_read_is_told_and_not_asked_for_again(opened):
    with served(StillAgent()) as running:
        page, asked = opened(running.url), []
        body = 'data: {"choices": [{"delta": {}}], "unspiral": {"finish": "answer"}}\n\n'

        def unreadable(route):
            asked.append(route.request.url)
            route.fulfill(status=200, body=body)

        page.route("**/v1/chat/completions", unreadable)
        ask(page)
        expect(page.locator("#state")).to_have_class("error")
        assert len(asked) == 1


def test_one_question_too_many_is_asked_again_when_there_is_room(opened):
    agent = SlowAgent()
    agent.loaded.set()
    agent.hold = asyncio.Event()
    with served(agent, limits=ServiceLimits(running=1, waiting=0)) as running:
        first, second = opened(running.url), opened(running.url)
        ask(first)
        expect(first.locator("#turns .written")).to_contain_text("<think>")
        ask(second, "and Faust?")
        full = "1 question in work and 0 waiting, the most that are accepted. Asked again in 1 s."
        expect(second.locator("#state")).to_have_text(full)
        agent.hold = None
        first.get_by_role("button", name="Stop").click()
        expect(second.locator("#answer")).to_have_text("Shakespeare")
        assert [question for question, _, _ in agent.asked] == [QUESTION, "and Faust?"]


def test_nothing_looks_as_if_more_came_after_an_error_or_a_stop(opened):
    agent = StillAgent()
    agent.fault = TimeoutError("the search took more than 60 s")
    with served(agent) as running:
        page = opened(running.url)
        ask(page)
        expect(page.locator("#state")).to_have_text("the search took more than 60 s")
        expect(page.locator("#answer")).to_have_text("no answer")
        agent.fault = None
        page.get_by_role("button", name="Ask").click()
        expect(page.locator("#answer")).to_have_text("Shakespeare")
        expect(page.locator("#state")).to_be_empty()


def test_a_refusal_before_anything_is_written_leaves_no_empty_answer(opened):
    with served(StillAgent()) as running:
        page = opened(running.url)
        body = json.dumps({"error": {"message": "no such thing", "code": None}})
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, body=body))
        ask(page)
        expect(page.locator("#state")).to_have_text("no such thing")
        expect(page.locator("#result")).to_be_hidden()
