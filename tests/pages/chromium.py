"""A real browser for tests of pages."""

from __future__ import annotations

import shutil

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


OURS = ("http://127", "data:", "blob:http://127")
"""Beginnings of what a page of ours may ask for."""


def opened(browser, url, width=1400, height=900, *, ours=OURS, **options):
    """A page at an address, which notes what must not be: `errors` of scripts and dialogs, and `foreign`
    addresses that it asks for."""
    page = browser.new_page(viewport={"width": width, "height": height}, **options)
    page.errors = []
    page.foreign = []
    page.on("pageerror", lambda e: page.errors.append(str(e)))
    page.on("dialog", lambda d: page.errors.append(d.message))
    page.on("request", lambda r: None if r.url.startswith(ours) else page.foreign.append(r.url))
    page.goto(url)
    return page


def closed_well(page):
    """Close a page, on which no script failed and nothing came from elsewhere."""
    assert (page.errors, page.foreign) == ([], [])
    page.close()


def until(page, expression, arg=None, seconds=60):
    """The page's own policy forbids eval, which wait_for_function needs as soon as it has to wait."""
    for _ in range(10 * seconds):
        if page.evaluate(expression, arg):
            return
        page.wait_for_timeout(100)
    raise TimeoutError(f"not true within {seconds} s: {expression}")


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=60_000)  # the five seconds of its own are soon over on two busy cores
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
