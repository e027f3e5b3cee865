"""Phone width in a real Chromium: what is wider than the window says so, and a full screen is one."""

from __future__ import annotations

import pytest
from chromium import CHROMIUM, browser, opened, until  # noqa: F401
from playwright.sync_api import expect
from test_likelihood_focus import run  # noqa: F401
from test_likelihood_step_page import recorded

from trainer.suite.shown.page import page as suite_page

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
SAID = "getComputedStyle(document.querySelector('.wide'), '::before').content"


def scrolled(page, to: str) -> None:
    page.evaluate(f"(() => {{ const e = document.querySelector('.wide'); e.scrollLeft = {to}; }})()")


def test_a_table_that_is_cut_says_on_which_side_it_goes_on(run, browser):
    page = opened(browser, f"{run.url}/runs/falls/steps/5", 390, 844)
    table = page.locator(".wide").first
    cut = {"right": "more columns →", "left": "← more columns", "both": "← more columns →"}
    for place, side in (("0", "right"), ("40", "both"), ("e.scrollWidth", "left")):
        expect(page.locator(".side .t").first).to_be_attached()
        scrolled(page, place)
        until(page, f"{SAID} === '\"{cut[side]}\"'")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.set_viewport_size({"width": 1440, "height": 900})
    expect(table).to_have_class("wide")
    until(page, f"{SAID} === 'none'")
    assert page.errors == []
    page.close()


def test_a_curve_over_the_whole_window_keeps_its_axis_whatever_stands_above_it(run, browser):
    for metrics in recorded()[:2]:  # a second run: a legend of more lines
        body = {"step": metrics.pop("step"), "metrics": metrics}
        run.http.post("/v1/runs/other/steps", json=body).raise_for_status()
    for width, height in ((390, 844), (1440, 900)):
        page = opened(browser, f"{run.url}/#runs=falls,other", width, height)
        page.locator("figure", has_text="Log-prob by class").get_by_role("button", name="Full screen").click()
        figure = page.locator("figure.full")
        canvas = figure.locator("canvas")
        until(page, "document.querySelector('figure.full canvas')?.getBoundingClientRect().height > 400")
        foot = (
            "(({ bottom }) => bottom)(document.querySelector('figure.full canvas').getBoundingClientRect())"
        )
        until(page, f"{foot} <= {height} && {foot} > {height - 80}")
        assert canvas.bounding_box()["width"] <= width
        assert figure.evaluate("e => e.scrollHeight - e.clientHeight") <= 1
        figure.get_by_role("button", name="Full screen").click()  # it says "close"
        expect(page.locator("figure.full")).to_have_count(0)
        assert page.errors == []
        page.close()
    run.http.delete("/v1/runs/other").raise_for_status()


def test_the_detectors_of_two_runs_are_told_apart(run, browser):
    for metrics in recorded():
        body = {"step": metrics.pop("step"), "metrics": metrics}
        run.http.post("/v1/runs/twin/steps", json=body).raise_for_status()
    page = opened(browser, f"{run.url}/#runs=falls,twin", 390, 844)
    lanes = page.locator("#lanes > .lane", has_text="likelihood")
    expect(lanes).to_have_count(2)
    colours = page.evaluate(
        "[...document.querySelectorAll('#lanes > .lane')].filter((e) => e.textContent.includes('likelihood'))"
        ".map((e) => e.querySelector('.swatch').style.background)"
    )
    assert len(set(colours)) == 2
    expect(page.locator("#lane-key li").nth(0)).to_have_text("falls")
    expect(page.locator("#lane-key li").nth(1)).to_have_text("twin")
    run.http.delete("/v1/runs/twin").raise_for_status()
    page.close()


def test_the_papers_table_names_its_rows_wherever_it_is_moved_to(browser, tmp_path):
    (tmp_path / "page.html").write_text(suite_page([]), encoding="utf-8")
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto((tmp_path / "page.html").as_uri())
    expect(page.locator(".sideways")).to_be_visible()
    page.locator(".wide").evaluate("e => e.scrollTo(300, 0)")
    assert page.locator("tr.printed td").first.bounding_box()["x"] >= 0
    page.set_viewport_size({"width": 1440, "height": 900})
    expect(page.locator(".sideways")).to_be_hidden()
    page.close()
