"""The page of a prompt through time: what is looked for stays in sight, and a colour means one change."""

from __future__ import annotations

import httpx
import pytest
from chromium import CHROMIUM, browser, closed_well, opened  # noqa: F401
from microscope_world import trajectory

from services.likelihood.rest.launch import ServeSettings, serve_in_thread

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
STEPS = 18


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    store = tmp_path_factory.mktemp("prompt") / "likelihood.db"
    server = serve_in_thread(ServeSettings(store=str(store), port=0))
    for step in range(1, STEPS + 1):
        one = trajectory("a")
        one = {**one, "uid": f"a{step}"}
        for segment in one["segments"]:
            if segment["by"] == "model":
                for key in ("logp_before", "logp_after"):
                    segment[key] = [value - 0.2 * step for value in segment[key]]
        httpx.post(
            f"{server.url}/v1/runs/r/steps", json={"step": step, "metrics": {"x": 1.0}}
        ).raise_for_status()
        body = {"trajectories": [one]}
        httpx.post(f"{server.url}/v1/runs/r/steps/{step}/samples", json=body).raise_for_status()
    yield server.url
    server.stop()


def box(locator):
    return locator.bounding_box()


@pytest.mark.parametrize("width", [1440, 390])
def test_no_row_is_cut_and_the_change_stands_at_the_edge(browser, url, width):
    page = opened(browser, f"{url}/runs/r/prompts", width)
    page.locator(".along tbody tr").first.wait_for()
    for table in (".wide.placed", ".wide.along"):
        beyond = page.locator(table).evaluate("one => one.scrollHeight - one.clientHeight")
        assert beyond <= 1, f"{table} scrolls inside though the page below is free"
    frame = box(page.locator(".wide.along"))
    for cell in (
        page.get_by_role("columnheader", name="Change", exact=True),
        page.locator(".along td:last-child").nth(2),
    ):
        place = box(cell)
        assert place["x"] + place["width"] <= frame["x"] + frame["width"] + 1, "scrolled out"
        assert place["x"] >= frame["x"]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    closed_well(page)


@pytest.mark.parametrize("width", [1440, 390])
def test_lost_stands_beside_its_bar_and_all_bars_are_one_scale(browser, url, width):
    page = opened(browser, f"{url}/runs/r/prompts", width)
    ends = page.locator(".scale .ends")
    ends.nth(1).wait_for()
    for i in range(ends.count()):
        lost, bar, gained = (box(ends.nth(i).locator(f":scope > :nth-child({n})")) for n in (1, 2, 3))
        assert lost["x"] + lost["width"] <= bar["x"] and bar["x"] + bar["width"] <= gained["x"]
        assert bar["y"] <= lost["y"] + lost["height"] / 2 <= bar["y"] + bar["height"]
    ticks = page.locator(".ticks").all_inner_texts()
    assert len(ticks) > 1 and len(set(ticks)) == 1, ticks
    closed_well(page)


@pytest.mark.parametrize("width", [1440, 390])
def test_the_curve_of_the_last_token_is_seen_when_it_is_pressed(browser, url, width):
    page = opened(browser, f"{url}/runs/r/prompts", width, 600)
    last = page.locator(".token-row").last
    last.scroll_into_view_if_needed()
    last.press("Enter")
    curve = page.locator(".one-token")
    number = page.locator(".token-row").count()
    curve.filter(has_text=f"token {number} of {number}").wait_for()
    place = box(curve)
    assert place["y"] >= 0 and place["y"] + place["height"] <= 600
    under = box(last)
    seen = page.evaluate(
        "([x, y]) => document.elementFromPoint(x, y)?.closest('button')?.className",
        [under["x"] + 4, under["y"] + 4],
    )
    assert seen == "token-row", "the curve does not cover the token"
    closed_well(page)
