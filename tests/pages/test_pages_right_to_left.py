"""Questions that are written from right to left, on the microscope's pages, in a real Chromium."""

from __future__ import annotations

import httpx
import pytest
from chromium import CHROMIUM, browser, closed_well, opened  # noqa: F401
from microscope_world import trajectory

from services.likelihood.rest.launch import ServeSettings, serve_in_thread

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
ARABIC, ANSWER = "ما هي عاصمة فرنسا ؟", "باريس"
DIRECTION = "one => getComputedStyle(one).direction"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    store = tmp_path_factory.mktemp("right") / "likelihood.db"
    server = serve_in_thread(ServeSettings(store=str(store), port=0))
    with httpx.Client(base_url=server.url) as http:
        for step in (1, 2):
            http.post("/v1/runs/r/steps", json={"step": step, "metrics": {"x": 1.0}}).raise_for_status()
            kept = [trajectory(uid, question=ARABIC, prompt=ARABIC, answer=ANSWER) for uid in ("a", "b")]
            body = {"trajectories": kept}
            http.post(f"/v1/runs/r/steps/{step}/samples", json=body).raise_for_status()
    yield server.url
    server.stop()


@pytest.mark.parametrize("path", ["steps/1", "prompts"])
def test_question_and_answer_run_from_the_right_and_the_page_does_not(browser, url, path):
    page = opened(browser, f"{url}/runs/r/{path}")
    heading = page.locator(".group-head h2 .outside")
    heading.filter(has_text=ARABIC).wait_for()
    assert heading.evaluate(DIRECTION) == "rtl"
    for text in page.locator("td.answer .outside").all():
        assert text.evaluate(DIRECTION) == "rtl"
    assert page.locator("body").evaluate(DIRECTION) == "ltr"
    if path == "prompts":
        assert page.locator("#prompt option").first.get_attribute("dir") == "auto"
    else:
        assert page.locator(".asked .outside").first.evaluate(DIRECTION) == "rtl"
    closed_well(page)


def test_one_token_is_no_tokens(browser, url):
    page = opened(browser, f"{url}/runs/r/steps/1")
    page.locator(".group-head").wait_for()
    assert page.evaluate("[0, 1, 2, 1200].map((n) => Unspiral.counted(n, 'token'))") == [
        "0 tokens",
        "1 token",
        "2 tokens",
        "1,200 tokens",
    ]
    closed_well(page)
