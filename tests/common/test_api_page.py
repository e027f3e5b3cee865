"""The API page of every service in a real Chromium: names are set as code, and no backtick is left."""

from __future__ import annotations

import pytest
from chromium import CHROMIUM, browser  # noqa: F401

from tests.common.gate_services import NAMES, serving
from tests.retriever.retriever_fixtures import small_index  # noqa: F401

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
WORDS = """() => [...document.querySelectorAll("section p, section td")].map((e) => e.textContent)"""


@pytest.mark.parametrize("name", NAMES)
def test_descriptions_have_code_for_backticks(tmp_path, small_index, browser, name):
    with serving(name, tmp_path, small_index) as served:
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.goto(f"{served.url}/docs")
        page.wait_for_selector("section h2")
        words = page.evaluate(WORDS)
        assert len(words) > 5 and not [text for text in words if "`" in text]
        if name == "agent":
            (asks,) = page.locator("section", has_text="Ask the agent the last user message").all()
            assert "reasoning_content" in asks.locator("p code").all_inner_texts()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.close()
