"""Wide tables of the site, in Chromium: they use the window, and where one still scrolls the page says so."""

from __future__ import annotations

import pytest
from chromium import CHROMIUM, browser, until  # noqa: F401
from test_docs_site import served, site  # noqa: F401

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]
WIDER = """[...document.querySelectorAll("[role=main] .wide, [role=main] pre > code")]
  .filter((box) => box.scrollWidth > box.clientWidth + 1)"""
SETTLED = f"{WIDER}.every((box) => box.matches('.more-after, .more-before'))"
UNTOLD = f"""{WIDER}.filter((box) => !box.matches(".more-after") || getComputedStyle(box).maskImage === "none"
    || box.matches(".wide") && !box.previousElementSibling.matches("p.sideways:not([hidden])"))
  .map((box) => box.textContent.slice(0, 60))"""
TOLD_FOR_NOTHING = """[...document.querySelectorAll("p.sideways:not([hidden])")]
  .filter((line) => line.nextElementSibling.scrollWidth <= line.nextElementSibling.clientWidth + 1).length"""


@pytest.fixture(scope="module")
def url(site):
    with served(site) as url:
        yield url


@pytest.fixture
def page(browser):
    page = browser.new_page()
    yield page
    page.close()


@pytest.mark.parametrize("width", [390, 1024, 1440])
def test_nothing_is_wider_than_its_box_without_a_sign_of_it(site, url, page, width):
    page.set_viewport_size({"width": width, "height": 900})
    untold, wider = {}, {}
    for file in sorted(site.glob("**/index.html")):
        name = file.parent.relative_to(site).as_posix()
        page.goto(f"{url}/{name}/")
        until(page, SETTLED)
        if found := page.evaluate(UNTOLD):
            untold[name] = found
        if cut := page.evaluate(f"{WIDER}.filter((box) => box.matches('.wide')).length"):
            wider[name] = cut
        assert page.evaluate(TOLD_FOR_NOTHING) == 0, name
    assert untold == {}
    if width == 1440:
        assert wider == {}, "at this width every table has its columns side by side"
    else:
        assert wider, "the signs were looked at"


def test_the_sign_follows_the_scrolling_and_the_window(page, url):
    page.set_viewport_size({"width": 390, "height": 900})
    page.goto(f"{url}/evaluation_measured/")
    table = page.locator(".wide", has_text="untrained:").first
    line = page.locator("p.sideways:visible", has_text="12 columns: scroll sideways").first
    line.wait_for()
    assert table.evaluate("(e) => e.className") == "wide more-after"
    table.evaluate("(e) => e.scrollTo(40, 0)")
    until(page, "document.querySelector('.wide.more-before.more-after') !== null")
    table.evaluate("(e) => e.scrollTo(e.scrollWidth, 0)")
    until(page, "document.querySelector('.wide.more-before:not(.more-after)') !== null")
    page.set_viewport_size({"width": 1440, "height": 900})
    until(page, "document.querySelector('p.sideways:not([hidden])') === null")
    assert table.evaluate("(e) => e.className") == "wide"


def test_tables_take_the_room_beside_the_text_which_keeps_its_length(page, url):
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(f"{url}/monitor/")
    table, text = (
        page.locator(where).evaluate("(e) => e.getBoundingClientRect().width")
        for where in (".wide:has-text('a sign of')", "[role=main] > ul:has-text('A phase speaks')")
    )
    assert table > 1100 and text <= 992


def test_a_name_that_may_wrap_is_copied_whole(page, url):
    page.goto(f"{url}/monitor/")
    names = page.locator(".wide td code").all_inner_texts()
    assert "displacement/share_negative" in names
