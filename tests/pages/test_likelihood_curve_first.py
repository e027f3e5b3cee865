"""The curves of reward and held-out score in a real Chromium: in the first window, directly below the answers
whichever tab is shown; what explains the page is folded."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from chromium import CHROMIUM, browser, opened  # noqa: F401
from playwright.sync_api import expect
from test_likelihood_step_page import recorded

from services.likelihood.exports.report import write_report
from services.likelihood.rest.launch import ServeSettings, serve_in_thread

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
ORDER = ["first", "lead", "curve-hint", "runs", "tabs", "phases", "alarm-panel", "lane-panel", "charts"]
TOPS = "(all) => all.map((one) => document.getElementById(one).getBoundingClientRect().top)"
GAP = """document.querySelector("#lead h2").getBoundingClientRect().top
  - document.querySelector("#first").getBoundingClientRect().bottom"""
FOLDED = ["Point at a curve", "no sign of a fall in likelihood or reward", "watch: the sign is seen"]


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    """Of the live page and of the report of one run."""
    folder = tmp_path_factory.mktemp("runs") / "falls"
    folder.mkdir()
    rows = [row | {"eval/em_greedy": 0.5} for row in recorded()]
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "config.yaml").write_text("run: {name: falls}\n")
    server = serve_in_thread(ServeSettings(store=str(folder / "likelihood.db"), port=0))
    for row in rows:
        metrics = {name: value for name, value in row.items() if name != "step"}
        body = {"step": row["step"], "metrics": metrics}
        httpx.post(f"{server.url}/v1/runs/falls/steps", json=body).raise_for_status()
    yield {
        "live": f"{server.url}/#runs=falls",
        "report": write_report([folder], folder / "report.html").as_uri(),
    }
    server.stop()


@pytest.fixture(scope="module")
def pair(addresses, tmp_path_factory):
    """Of both, with a second run."""
    folder = tmp_path_factory.mktemp("runs") / "other"
    folder.mkdir()
    rows = [row | {"eval/em_greedy": 0.4} for row in recorded()[:9]]
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    live = addresses["live"].partition("/#")[0]
    for row in rows:
        metrics = {name: value for name, value in row.items() if name != "step"}
        body = {"step": row["step"], "metrics": metrics}
        httpx.post(f"{live}/v1/runs/other/steps", json=body).raise_for_status()
    report = Path(urlsplit(addresses["report"]).path)
    both = write_report([report.parent, folder], folder / "report.html")
    return {"live": f"{live}/#runs=falls,other", "report": both.as_uri()}


def shown(browser, address, *size):
    page = opened(browser, address, *size)
    page.locator("#lead figure:not([hidden]) canvas").first.wait_for()
    return page


def closed(page):
    assert page.errors == []
    page.close()


@pytest.mark.parametrize("place", ["live", "report"])
@pytest.mark.parametrize("size", [(1440, 900), (390, 844)])
def test_the_curve_of_the_reward_stands_directly_below_the_answers(browser, addresses, place, size):
    page = shown(browser, addresses[place], *size)
    tops = page.evaluate(TOPS, ORDER)
    assert tops == sorted(tops) and len(set(tops)) == len(ORDER)
    assert 0 <= page.evaluate(GAP) < 40, "nothing stands between them"
    titles = page.locator("#lead figure:not([hidden]) figcaption strong").all_inner_texts()
    assert titles == ["Reward", "Held-out score"]
    assert page.evaluate("document.documentElement.scrollWidth") == size[0]
    if size[0] == 1440:
        plots = [page.locator("#lead canvas").nth(i).bounding_box() for i in range(2)]
        assert all(plot["y"] + plot["height"] <= size[1] for plot in plots), "both lie in the first window"
        assert plots[1]["x"] > plots[0]["x"] + plots[0]["width"], "beside each other"
    closed(page)


@pytest.mark.parametrize("place", ["live", "report"])
def test_of_two_runs_both_curves_lie_in_the_first_window(browser, addresses, pair, place):
    page = shown(browser, pair[place])
    page.locator(".answers").nth(1).wait_for()
    tops = page.evaluate(TOPS, ["lead", "curve-hint", "first", "runs", "tabs"])
    assert tops == sorted(tops) and len(set(tops)) == 5
    plots = [page.locator("#lead canvas").nth(i).bounding_box() for i in range(2)]
    assert all(plot["y"] + plot["height"] <= 600 for plot in plots)
    if place == "live":  # with one run left, its answers stand first again
        page.get_by_role("checkbox", name="other").uncheck()
        expect(page.locator(".answers")).to_have_count(1)
        tops = page.evaluate(TOPS, ORDER[:5])
        assert tops == sorted(tops)
    closed(page)


@pytest.mark.parametrize("place", ["live", "report"])
def test_what_explains_the_page_is_folded_and_can_be_read(browser, addresses, place):
    page = shown(browser, addresses[place])
    for text, name in zip(FOLDED, ["#curve-hint", "#phases .how", "#lane-help"], strict=True):
        expect(page.get_by_text(text).last).to_be_hidden()
        page.locator(f"{name} > summary").click()
        expect(page.locator(name).get_by_text(text)).to_be_visible()
    closed(page)


def test_the_curves_below_the_answers_stay_while_another_tab_is_shown(browser, addresses):
    page = shown(browser, f"{addresses['live']}&tab=about")
    expect(page.locator("#curve-hint summary")).to_be_visible()
    expect(page.locator("#charts")).to_be_hidden()
    before = page.locator("#tabs").bounding_box()["y"]
    page.get_by_role("tab", name="Curves").click()
    expect(page.locator("#charts")).to_be_visible()
    assert page.locator("#tabs").bounding_box()["y"] == before, "the tabs stay where they are"
    assert page.locator("#charts figcaption strong", has_text="Reward").count() == 0
    closed(page)


def test_the_skip_link_leads_to_the_first_curves(browser, addresses):
    page = shown(browser, addresses["live"])
    assert page.locator(".skip").get_attribute("href") == "#lead"
    closed(page)
