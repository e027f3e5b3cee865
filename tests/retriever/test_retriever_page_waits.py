"""A query that the retriever cannot take now waits on its page, and is searched for once it can be."""

from __future__ import annotations

import pytest
from chromium import CHROMIUM, browser  # noqa: F401
from playwright.sync_api import expect

from retriever_service.http.launch import serve_in_thread
from retriever_service.settings import ServerSettings
from tests.retriever.retriever_fixtures import small_index  # noqa: F401

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
HELD = "Your query waits, and is searched for as soon as it can be."
LOADING = '{"detail": "the index is still loading: bm25"}'


@pytest.mark.parametrize("width", [1440, 390])
def test_a_query_waits_for_a_retriever_that_loads_or_is_away(browser, small_index, width):
    with serve_in_thread(ServerSettings(index=str(small_index), port=0)) as running:
        page = browser.new_page(viewport={"width": width, "height": 900})
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.route("**/readyz", lambda route: route.fulfill(status=503, body=LOADING))
        page.goto(running.url)
        notice = page.locator("#service")
        expect(notice).to_contain_text("The index is still loading: bm25. A query sent now waits")
        page.get_by_label("Query").fill("Mina Frost")
        page.get_by_label("Query").press("Enter")
        expect(notice).to_have_text(f"The index is still loading: bm25. {HELD}")
        expect(page.locator("#state")).to_be_empty()
        page.unroute("**/readyz")
        expect(page.locator("li").first).to_contain_text("1. Mina Frost")
        expect(notice).to_be_hidden()
        expect(page.get_by_label("Query")).to_have_attribute("placeholder", "Search 186 passages (bm25)")
        port = int(running.url.rpartition(":")[2])
    page.get_by_label("Query").fill("lighthouse")
    page.get_by_role("button", name="Search").click()
    expect(notice).to_have_text(f"The service does not answer. {HELD}")
    expect(notice).to_have_class("gone")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    with serve_in_thread(ServerSettings(index=str(small_index), port=port)):
        expect(page.locator("#state")).to_contain_text("passages in")
        expect(notice).to_be_hidden()
        assert not errors
        page.close()


def test_an_answer_that_the_page_cannot_read_is_told_and_not_asked_for_again(browser, small_index):
    with serve_in_thread(ServerSettings(index=str(small_index), port=0)) as running:
        page, asked = browser.new_page(), []

        def unreadable(route):
            asked.append(route.request.url)
            route.fulfill(status=200, body="{}")

        page.route("**/retrieve", unreadable)
        page.goto(running.url)
        page.get_by_label("Query").fill("lighthouse")
        page.get_by_role("button", name="Search").click()
        expect(page.locator("#state")).to_have_class("error")
        assert len(asked) == 1
        page.close()
