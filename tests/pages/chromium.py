"""A real browser for tests of pages."""

from __future__ import annotations

import shutil

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def until(page, expression, arg=None, seconds=30):
    """The page's own policy forbids eval, which wait_for_function needs as soon as it has to wait."""
    for _ in range(10 * seconds):
        if page.evaluate(expression, arg):
            return
        page.wait_for_timeout(100)
    raise TimeoutError(f"not true within {seconds} s: {expression}")


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
