"""Held-out scores on the live page, in a real Chromium: from before the first step to after the last."""

from __future__ import annotations

import httpx
import pytest
from chromium import CHROMIUM, browser  # noqa: F401
from test_likelihood_step_page import opened

from services.likelihood.evaluations import evaluation_event
from services.likelihood.rest.launch import ServeSettings, serve_in_thread

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
GREEDY = "eval/em_greedy"


@pytest.fixture
def run(tmp_path):
    """The address of a run that has said what it is, and no more."""
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "likelihood.db"), port=0))
    httpx.post(f"{server.url}/v1/runs/r/about", json={"steps": 2}).raise_for_status()
    yield server.url
    server.stop()


def step(url, number, **metrics):
    body = {"step": number, "metrics": {"reward/mean": 0.5} | metrics}
    httpx.post(f"{url}/v1/runs/r/steps", json=body).raise_for_status()


def evaluated(url, number, tag, score):
    event = evaluation_event(number, 0, tag, "greedy", {"em": score, "f1": score, "n": 200}, {GREEDY: score})
    httpx.post(f"{url}/v1/runs/r/events", json=event.model_dump()).raise_for_status()


def test_each_score_is_on_the_open_page_when_it_is_made(browser, run):
    page = opened(browser, f"{run}/#runs=r")
    learning = page.locator(".answer.learning")
    learning.filter(has_text="No held-out score was posted").wait_for()
    evaluated(run, 0, "before", 0.0)
    learning.filter(has_text="0 held-out EM, greedy, at step 0, the only score so far").wait_for()
    step(run, 1, **{GREEDY: 0.0})
    learning.filter(has_text="0 held-out EM, greedy, at step 1, the only score so far").wait_for()
    step(run, 2)
    evaluated(run, 2, "after", 0.97)
    learning.filter(has_text="0.970 held-out EM, greedy, at step 2, up from 0 at step 1").wait_for()
    assert page.locator("#runs tbody td[data-label='Held-out']").inner_text() == "0.970"
    page.get_by_role("tab", name="Evaluations").click()
    rows = page.locator(".evaluations.own tbody tr")
    rows.nth(1).wait_for()
    assert [text.replace("\n", " ").split() for text in rows.all_inner_texts()] == [
        ["r,", "step", "2", "after", "greedy", ".970", ".970", "200"],
        ["r,", "step", "0", "before", "greedy", ".000", ".000", "200"],
    ]
    assert not page.errors
    page.close()
