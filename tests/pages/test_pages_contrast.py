"""All text of the pages can be read, in light and dark: a contrast of 4.5 at least (WCAG 1.4.3). On a phone a
finger hits every control: 24 pixels (WCAG 2.5.8)."""

from __future__ import annotations

import json

import chromium
import httpx
import pytest
from chromium import CHROMIUM, browser  # noqa: F401
from contrast import faint
from microscope_world import trajectory
from places import DATA
from playwright.sync_api import expect

from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from tests.common.gate_services import serving
from tests.retriever.retriever_fixtures import small_index  # noqa: F401

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
CURVE = "figure:not([hidden]) canvas"
RUNS = ["grpo_2", "llds5_2", "third", "fourth", "fifth", "sixth", "seventh", "eighth"]
CHIPS = (
    "document.getElementById('first').append(...Object.keys(Unspiral.PHASES).map((p) => Unspiral.chip(p)))"
)
PAGES = {
    f"/#runs={','.join(RUNS)}": CURVE,
    f"/#runs={RUNS[0]}&pin=20": "#pinned .pin-head",
    f"/#runs={RUNS[0]}&tab=about": "#tab-about",
    f"/runs/{RUNS[0]}/steps/1": ".side .t",
    f"/runs/{RUNS[0]}/prompts": "#time section",
    f"/runs/{RUNS[0]}/evaluations": "main",
    "/no/such/page": "main",
    "/docs": "section h2",
}

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
LOW = """() => [...document.querySelectorAll("button, input, select, summary, .top nav a")]
    .filter((e) => e.checkVisibility() && e.getBoundingClientRect().height < 23.9)
    .map((e) => `${e.tagName} ${e.className} ${e.textContent.slice(0, 30)}`)"""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    store = tmp_path_factory.mktemp("contrast") / "l.db"
    with (
        serve_in_thread(ServeSettings(store=str(store), port=0)) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        for run in RUNS:
            rows = (DATA / "lab" / f"{run if run in RUNS[:2] else RUNS[1]}.jsonl").read_text().splitlines()
            for row in rows[:40] if run in RUNS[:2] else rows[:3]:
                metrics = json.loads(row)
                step = metrics.pop("step")
                body = {"step": step, "metrics": metrics}
                http.post(f"/v1/runs/{run}/steps", json=body).raise_for_status()
        made = [trajectory("t1"), trajectory("t2", right=False, answer="Nobody", fall=2.0)]
        made += [trajectory("t3", fall=-0.05, group="q2")]
        http.post(f"/v1/runs/{RUNS[0]}/steps/1/samples", json={"trajectories": made}).raise_for_status()
        http.post(f"/v1/runs/{RUNS[1]}/about", json={"ended": 1, "exit": 4}).raise_for_status()
        yield server.url


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_the_pages_of_runs(url, browser, path, scheme):
    page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme=scheme)
    page.goto(url + path)
    page.locator(PAGES[path]).first.wait_for()
    if "," in path:  # every phase, whichever these runs are in
        page.evaluate(CHIPS)
    assert faint(page) == []
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["agent", "retriever"])
def test_the_pages_to_ask_in(browser, tmp_path, small_index, name, scheme):
    with serving(name, tmp_path, small_index) as served:
        page = chromium.opened(browser, served.url, ours=served.url, color_scheme=scheme)
        page.locator("textarea, input[type=search]").first.fill("Mina Frost")
        page.get_by_role("button", name="Ask" if name == "agent" else "Search").click()
        expect(page.locator("#turns > li" if name == "agent" else "#results > li").first).to_be_visible()
        assert faint(page) == []
        page.evaluate("document.getElementById('service').hidden = false")
        page.evaluate("document.getElementById('service').textContent = 'The service does not answer.'")
        page.evaluate("say('it went wrong', true)")
        assert faint(page) == []
        chromium.closed_well(page)


@pytest.mark.parametrize("path", PAGES)
def test_a_finger_hits_the_controls_of_runs(url, browser, path):
    page = browser.new_page(**PHONE)
    page.goto(url + path)
    page.locator(PAGES[path]).first.wait_for()
    page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    assert page.evaluate(LOW) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()


@pytest.mark.parametrize("name", ["agent", "retriever"])
def test_a_finger_hits_the_controls_to_ask(browser, tmp_path, small_index, name):
    with serving(name, tmp_path, small_index) as served:
        page = browser.new_page(**PHONE)
        page.goto(served.url)
        page.locator("textarea, input[type=search]").first.fill("Mina Frost")
        page.get_by_role("button", name="Ask" if name == "agent" else "Search").click()
        expect(page.locator("#turns > li" if name == "agent" else "#results > li").first).to_be_visible()
        assert page.evaluate(LOW) == []
        page.close()
