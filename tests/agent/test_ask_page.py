"""The agent's page in a real Chromium: a question, its answer, the turns with searches and documents, and the
tokens in the colours of their log-probs."""

from __future__ import annotations

import asyncio
import re
from contextlib import closing

import chromium
import pytest
from agent_world import NAME, StillAgent, spec_of
from chromium import CHROMIUM, browser  # noqa: F401
from playwright.sync_api import expect

from services.agent.agent import Agent, Curves
from services.agent.launch import serve_in_thread
from services.agent.server import create_app
from services.common.http.serving import Manner, bind, run_in_thread

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
QUESTION = "who wrote Hamlet?"
TOKEN = "s3cret"


@pytest.fixture(scope="module")
def service():
    agent = StillAgent()
    with serve_in_thread(agent, NAME) as running:
        yield agent, running.url


@pytest.fixture
def still(service):
    service[0].reset()
    return service[0]


@pytest.fixture
def opened(browser, service, still):
    """Opens the page, and sees afterwards that no script failed and nothing came from elsewhere."""
    pages = []

    def open_at(path="/", url=service[1], width=1440, **options):
        pages.append(chromium.opened(browser, url + path, width, ours=url, **options))
        return pages[-1]

    yield open_at
    for page in pages:
        chromium.closed_well(page)


def test_a_question_is_answered_with_turns_searches_and_documents(opened, still):
    page = opened()
    expect(page).to_have_title(f"Ask {NAME}")
    page.get_by_label("Question").fill(QUESTION)
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#answer")).to_have_text("Shakespeare")
    expect(page.locator("#facts")).to_have_text("answered · 1 search · 3 tokens · 1.5 s")
    assert still.asked == [(QUESTION, 0.0, None)]
    first, last = page.locator("#turns > li").all()
    expect(first.locator(".written span")).to_have_text([" t1", " t2"])
    expect(first).to_contain_text("1 document in 0.25 s for “Hamlet”")
    document = first.locator("details")
    expect(document.locator("p")).to_be_hidden()
    document.get_by_text("1. Hamlet").click()
    expect(document.locator("p")).to_have_text("a play by <b>Shakespeare</b>")
    expect(document).to_contain_text("id d1 · score 2.5000")
    expect(last.locator(".written span")).to_have_text([" t6"])
    expect(page.locator("#state")).to_be_empty()
    expect(page).to_have_url(re.compile(r"\?q=who\+wrote\+Hamlet%3F$"))


def test_what_is_written_from_right_to_left_runs_so(opened):
    page = opened()
    field = page.get_by_label("Question")
    for text, direction in (("من كتب هاملت ؟", "rtl"), (QUESTION, "ltr")):
        field.fill(text)
        assert field.evaluate("one => getComputedStyle(one).direction") == direction
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#answer")).to_have_text("Shakespeare")
    for part in ("#answer", "#turns .written"):
        assert page.locator(part).first.get_attribute("dir") == "auto"
    expect(page.locator("#turns bdi")).to_have_text("Hamlet")


def test_the_less_likely_a_token_the_stronger_its_colour_and_each_can_be_read(opened):
    page = opened()
    page.keyboard.type(QUESTION)  # the question has the focus
    page.keyboard.press("Enter")
    expect(page.locator("#answer")).to_have_text("Shakespeare")
    tokens = page.locator(".written span")
    shares = [re.search(r"(\d+)%", tokens.nth(i).get_attribute("style"))[1] for i in range(3)]
    assert shares == ["10", "5", "3"], "of -0.5, -0.25 and -0.125; 60 % at -3"
    readout = page.locator("#readout")
    tokens.nth(1).hover()
    expect(readout).to_have_text('token 2 " t2": log-prob −0.250, probability 0.78')
    page.locator(".written").first.focus()
    page.keyboard.press("ArrowLeft")
    expect(readout).to_have_text('token 1 " t1": log-prob −0.500, probability 0.61')
    page.keyboard.press("ArrowLeft")  # there is none before it
    expect(readout).to_contain_text("token 1 ")


def test_text_stands_there_while_it_is_written_and_can_be_stopped(opened, still):
    still.hold = asyncio.Event()
    page = opened(f"/?q={QUESTION}&t=0.5")
    expect(page.get_by_label("Question")).to_have_value(QUESTION)
    assert still.asked == [], "a link alone asks nothing"
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#turns .written")).to_have_text("<think> who </think> <search> Hamlet </search>")
    expect(page.locator("#state")).to_have_text("It writes…")
    assert still.asked == [(QUESTION, 0.5, None)]
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#state")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    still.hold = None
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#answer")).to_have_text("Shakespeare")


def test_an_error_is_said_in_its_own_words(opened, still):
    still.fault = TimeoutError("the search took more than 60 s")
    page = opened()
    page.get_by_label("Question").fill(QUESTION)
    page.get_by_label("Question").press("Enter")
    expect(page.locator("#state")).to_have_text("the search took more than 60 s")
    expect(page.locator("#state")).to_have_class("error")


def test_with_a_token_the_page_asks_for_it(opened, still):
    agent = StillAgent()

    def assembled(parts):
        sock = parts.enter_context(closing(bind("127.0.0.1", 0, "agent")))
        return create_app(agent, NAME, TOKEN), sock

    with run_in_thread(assembled, "127.0.0.1", "agent", 60.0, Manner(lifespan="on")) as served:
        page = opened(url=served.url)
        token = page.get_by_label("API token")
        expect(token).to_be_visible()
        expect(page.locator("#state")).to_have_text("This service asks for its API token.")
        token.fill(TOKEN)
        page.get_by_label("Question").fill(QUESTION)
        page.get_by_label("Question").press("Enter")
        expect(page.locator("#answer")).to_have_text("Shakespeare")
        assert TOKEN not in page.url


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_scrolls_sideways(opened, scheme):
    page = opened(width=390, color_scheme=scheme)
    page.get_by_label("Question").fill("x" * 300)
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#answer")).to_have_text("Shakespeare")
    page.locator("summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_page_has_the_look_of_the_others_and_a_way_to_the_runs_curves(opened):
    command = Curves(None, "unspiral serve likelihood --store runs/mine")
    for curves in (command, Curves("http://127.0.0.1:1/#runs=mine", None), None):
        with serve_in_thread(StillAgent(), NAME, None, curves) as running:
            page = opened(url=running.url)
            expect(page).to_have_title(f"Ask {NAME}")
            expect(page.locator("header h1")).to_have_text("Unspiral agent")
            page.get_by_role("button", name="Colour theme").click()
            assert page.evaluate("document.documentElement.dataset.theme") == "light"
            link, said = page.get_by_role("link", name="curves of its run"), page.locator("#run")
            if curves is command:
                expect(said).to_have_text(
                    "The curves of its run: unspiral serve likelihood --store runs/mine"
                )
            else:
                expect(said).to_be_hidden()
            if curves and curves.url:
                expect(link).to_have_attribute("href", curves.url)
            else:
                expect(link).to_be_hidden()


def test_a_real_agent_searches_on_the_page(opened, model, search):
    with serve_in_thread(Agent(spec_of(model, search.url)), "tiny") as running:
        page = opened(url=running.url)
        page.get_by_label("Question").fill("what is the river of n3 ?")
        page.get_by_label("Question").press("Enter")
        expect(page.locator("#facts")).to_contain_text("token", timeout=60_000)
        written = "".join(page.locator(".written span").all_text_contents())
        assert written.startswith("<") and page.locator(".search").count() >= 1
