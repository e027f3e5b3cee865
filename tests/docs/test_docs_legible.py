"""The text of the site, its bar too, can be read (a contrast of 4.5); a wrong address has a way on."""

from __future__ import annotations

import chromium
import pytest
from chromium import CHROMIUM, browser  # noqa: F401
from contrast import faint
from playwright.sync_api import expect

from tests.docs.test_docs_site import served, site  # noqa: F401

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_text_of_the_site_can_be_read(site, browser, scheme):
    with served(site) as url:
        for path in ("", "ask/", "monitor/", "settings/", "404.html"):
            page = chromium.opened(browser, f"{url}/{path}", 1440, ours=url, color_scheme=scheme)
            expect(page.locator("h1").first).to_be_visible()
            assert faint(page) == [], path
            chromium.closed_well(page)


def test_an_address_without_a_page_leads_to_the_first_one(site, browser):
    with served(site) as url:
        page = chromium.opened(browser, f"{url}/404.html", 390, ours=url)
        page.get_by_role("link", name="The first page").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("Unspiral")
        chromium.closed_well(page)
