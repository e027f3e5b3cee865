"""Pages that were opened while their service could not answer, or that lost it, go on by themselves; what was
chosen comes before what other runs' rows need; and a run's colour is told beside the curves, and stays."""

from __future__ import annotations

import re
from urllib.parse import unquote

import httpx
import pytest
from chromium import CHROMIUM, browser  # noqa: F401
from microscope_world import trajectory
from playwright.sync_api import expect

from services.likelihood.rest.launch import ServeSettings, serve_in_thread

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
CURVE = "figure:not([hidden]) canvas"
PALETTE = """[...document.querySelectorAll('#run-key li')].map(
    (e) => [e.textContent, e.querySelector('.swatch').style.background])"""


@pytest.fixture
def server(tmp_path):
    with serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0)) as running:
        yield running


def post(server, run, step, **metrics):
    body = {"step": step, "metrics": {"reward/mean": 0.5, "time/step": 1.0} | metrics}
    httpx.post(f"{server.url}/v1/runs/{run}/steps", json=body, trust_env=False).raise_for_status()


@pytest.fixture
def opened(browser):
    pages = []

    def open_at(url, width=1440, prepare=lambda page: None):
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.errors = []
        page.on("pageerror", lambda e: page.errors.append(str(e)))
        prepare(page)
        page.goto(url)
        pages.append(page)
        return page

    yield open_at
    for page in pages:
        assert page.errors == []
        page.close()


def refusing(*patterns):
    """Lets a page's requests be refused, as a service does that starts; `page.unroute_all` ends it."""
    body = '{"detail": "the service starts"}'

    def prepare(page):
        for pattern in patterns:
            page.route(pattern, lambda route: route.fulfill(status=503, body=body))

    return prepare


def test_a_page_that_was_opened_too_early_reads_once_it_can(server, opened):
    for step in range(1, 4):
        post(server, "mine", step)
    page = opened(server.url, prepare=refusing("**/v1/**"))
    expect(page.locator("#status")).to_have_text("the service starts; trying again")
    expect(page.locator("#status")).to_have_class("status lost")
    page.unroute_all()
    expect(page.locator(CURVE).first).to_be_visible()
    expect(page.locator("#status")).to_have_text("live")


@pytest.mark.parametrize("path", ["/runs/mine/steps/1", "/runs/mine/prompts"])
def test_so_do_the_pages_of_a_step_and_of_a_prompt(server, opened, path):
    post(server, "mine", 1)
    body = {"trajectories": [trajectory("t1"), trajectory("t2", right=False)]}
    httpx.post(f"{server.url}/v1/runs/mine/steps/1/samples", json=body, trust_env=False).raise_for_status()
    page = opened(server.url + path, prepare=refusing("**/v1/**"))
    expect(page.locator("#status")).to_have_text("the service starts; trying again")
    page.unroute_all()
    expect(page.get_by_role("heading", name="Who founded Arl?").first).to_be_visible()
    expect(page.locator("#status")).to_have_class("status live")


def test_a_failure_of_the_page_itself_is_told_and_not_tried_for_ever(server, opened):
    def unreadable(page):
        page.route("**/v1/runs", lambda route: route.fulfill(status=200, body="{}"))

    page = opened(server.url, prepare=unreadable)
    expect(page.locator("#status")).to_have_class("status lost")
    expect(page.locator("#status")).to_have_text(re.compile(r"^this page failed \(.*\)$"))


def test_a_stream_that_was_refused_is_opened_again(server, opened):
    post(server, "mine", 1)
    page = opened(server.url, prepare=refusing("**/v1/stream"))
    expect(page.locator("#status")).to_have_text("connection lost; trying again")
    page.unroute_all()
    expect(page.locator("#status")).to_have_text("live")
    post(server, "mine", 2)
    expect(page.locator("#first .doing")).to_contain_text("step 2")


def test_the_chosen_run_is_read_before_the_rows_of_the_others(server, opened):
    for name in ("a", "b", "c", "d", "e", "mine"):
        post(server, name, 1)
    asked = []
    page = opened(
        f"{server.url}/#runs=mine", prepare=lambda page: page.on("request", lambda r: asked.append(r.url))
    )
    expect(page.locator("#runs tr", has_text="a").last).to_contain_text("0.500")
    runs = [found[1] for url in asked if (found := re.search(r"/v1/runs/(\w+)/", url))]
    assert set(runs) == {"a", "b", "c", "d", "e", "mine"}
    last_of_mine = max(i for i, name in enumerate(runs) if name == "mine")
    assert set(runs[: last_of_mine + 1]) == {"mine"}


@pytest.mark.parametrize("width", [1440, 390])
def test_the_colours_of_several_runs_are_told_at_the_top_and_stay(server, opened, width):
    for name in ("one", "two", "three"):
        post(server, name, 1)
        post(server, name, 2)
    page = opened(f"{server.url}/#runs=one,two,three", width)
    key = page.locator("#run-key li")
    expect(key).to_have_text(["one", "two", "three"])
    assert key.first.bounding_box()["y"] < page.locator(CURVE).first.bounding_box()["y"]
    before = page.evaluate(PALETTE)
    assert len({colour for _, colour in before}) == 3
    post(server, "one", 3)  # now the run that was written to last
    body = {"step": 3, "kind": "evaluation", "text": "greedy", "data": {"em": 0.5}}
    httpx.post(f"{server.url}/v1/runs/one/events", json=body, trust_env=False).raise_for_status()
    expect(page.locator("#runs tbody tr").first).to_contain_text("one")  # read anew
    assert page.evaluate(PALETTE) == before
    page.get_by_role("checkbox", name="two").click()
    expect(key).to_have_text(["one", "three"])
    assert page.evaluate(PALETTE) == [before[0], before[2]]
    assert unquote(page.url).endswith("runs=one,three")
    page.get_by_role("checkbox", name="three").click()
    expect(key).to_have_text(["one"])  # named, as its row stands below the curves
    expect(page.locator("#run-key .swatch")).to_have_count(0)  # its lines have colours of their own
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_tab_of_a_service_that_was_started_on_another_store_names_the_run_that_is_gone(tmp_path, opened):
    with serve_in_thread(ServeSettings(store=str(tmp_path / "first.db"), port=0)) as server:
        post(server, "mine", 1)
        page = opened(f"{server.url}/#runs=mine")
        expect(page.locator("#first .doing")).to_contain_text("step 1")
        port = int(server.url.rpartition(":")[2])
    expect(page.locator("#status")).to_have_text("connection lost; trying again")
    with serve_in_thread(ServeSettings(store=str(tmp_path / "second.db"), port=port)) as server:
        post(server, "other", 1)
        expect(page.locator("#no-such-run")).to_have_text(
            "No run mine in this store. Choose one below.", timeout=60_000
        )
        expect(page.locator("#runs tbody tr")).to_contain_text(["other"])
        expect(page.locator("#first .answers")).to_have_count(0)
        page.get_by_role("checkbox", name="other").click()
        expect(page.locator("#first .doing")).to_contain_text("step 1")
