"""A browser at an address that a service does not have gets a page with the ways to those that there are;
programs get the line of JSON as before."""

from __future__ import annotations

import re

import chromium
import httpx
import pytest
from chromium import CHROMIUM, browser  # noqa: F401
from playwright.sync_api import expect

from tests.common.gate_services import NAMES, serving
from tests.retriever.retriever_fixtures import small_index  # noqa: F401

READS = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PATH = "/nothing/%3Cb%3Ehere"


@pytest.mark.parametrize("name", NAMES)
def test_only_who_reads_pages_gets_one(tmp_path, small_index, name):
    with serving(name, tmp_path, small_index) as served, httpx.Client(trust_env=False) as http:
        page = http.get(served.url + PATH, headers=READS)
        assert page.status_code == 404 and page.headers["content-type"].startswith("text/html")
        assert "<code>/nothing/&lt;b&gt;here</code>" in page.text and "<!--way" not in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for method, headers in (("GET", {}), ("POST", READS)):
            told = http.request(method, served.url + PATH, headers=headers)
            assert told.status_code == 404 and told.headers["content-type"] == "application/json"
            assert "/nothing/" in told.text


def test_a_page_of_the_api_says_itself_what_is_missing(tmp_path, small_index):
    with serving("likelihood", tmp_path, small_index) as served:
        told = httpx.get(f"{served.url}/v1/runs/none/summary", headers=READS, trust_env=False)
        assert told.status_code == 404 and "none" in told.json()["detail"]


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("name", NAMES)
def test_its_links_lead_to_what_there_is(tmp_path, small_index, browser, name):
    with serving(name, tmp_path, small_index) as served:
        page = chromium.opened(browser, served.url + PATH, 390, 844, ours=served.url)
        expect(page.get_by_role("heading", name="There is no page at")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.get_by_role("link", name="API").click()
        expect(page.locator("section h2").first).to_be_visible()
        page.go_back()
        page.get_by_role("link", name="the page of the service").click()
        expect(page).to_have_url(re.compile("/(docs)?$"))
        chromium.closed_well(page)
