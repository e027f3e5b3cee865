"""Held-out scores on the live page, in a real Chromium: from before the first step to after the last."""

from __future__ import annotations

import httpx
import pytest
from chromium import CHROMIUM, browser, opened  # noqa: F401
from microscope_world import trajectory

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
    learning.filter(has_text="no step has ended yet").wait_for()
    evaluated(run, 0, "before", 0.0)
    only = "0 held-out EM, greedy, before training, the only score so far "
    only += "(200 questions, 95 % interval 0.00 to 0.02)"
    learning.filter(has_text=only).wait_for()
    step(run, 1, **{GREEDY: 0.0})
    page.locator("#runs tbody tr", has_text="0.500").wait_for()
    learning.filter(has_text=only).wait_for()
    step(run, 2)
    evaluated(run, 2, "after", 0.97)
    rose = "0 → 0.970 held-out EM, greedy, before training to step 2 "
    rose += "(200 questions, +0.970, 95 % interval +0.93 to +0.99)"
    learning.filter(has_text=rose).wait_for()
    assert learning.locator("strong").first.inner_text() == "0 → 0.970", "what is known comes first"
    assert "0.500 at step 1, 0.500 at step 2; so few steps show no direction" in learning.inner_text()
    for number in range(3, 23):
        step(run, number)
    learning.filter(has_text="0.970 held-out EM, greedy, at step 2, up from 0 before training").wait_for()
    assert learning.locator("strong").first.inner_text().startswith("no clear change")
    assert page.locator("#runs tbody td[data-label='Held-out']").inner_text() == "0.970"
    page.get_by_role("tab", name="Evaluations").click()
    rows = page.locator(".evaluations.own tbody tr")
    rows.nth(1).wait_for()
    assert [text.replace("\n", " ").split()[:-2] for text in rows.all_inner_texts()] == [
        ["r,", "step", "2", "after", "greedy", "0.970", "0.936–0.986", "0.970", "200"],
        ["r,", "before", "training", "before", "greedy", "0.000", "0.000–0.019", "0.000", "200"],
    ], "and when they were made"
    assert not page.errors
    page.close()


def test_scores_by_source_are_a_chart_with_a_curve_for_each(browser, run):
    """The sources of the evaluation set, whatever their names; the score over all stands in its own chart."""
    for number, (nq, hotpot) in enumerate([(0.125, 0.25), (0.5, 0.375)], 1):
        sources = {"eval/nq/em_greedy": nq, "eval/hotpotqa/em_greedy": hotpot}
        step(run, number, **sources, **{GREEDY: (nq + hotpot) / 2})
    page = opened(browser, f"{run}/#runs=r")
    chart = page.locator("figure", has=page.get_by_text("Held-out EM by source, greedy", exact=True))
    group = page.locator("details", has=chart)
    if group.get_attribute("open") is None:
        group.locator("summary").first.click()
    chart.locator("canvas").first.wait_for()
    told = [" ".join(text.split()) for text in chart.locator(".legend button").all_inner_texts()]
    assert told == ["hotpotqa 0.375", "nq 0.500"]
    assert not page.errors
    page.close()


def test_scores_stay_however_many_other_events_follow(browser, run):
    evaluated(run, 0, "before", 0.0)
    evaluated(run, 2, "after", 0.97)
    step(run, 1, **{GREEDY: 0.0})
    step(run, 2)
    with httpx.Client(base_url=run) as client:
        for number in range(201):
            body = {"step": 2, "kind": "note", "text": f"note {number}"}
            client.post("/v1/runs/r/events", json=body).raise_for_status()
    page = opened(browser, f"{run}/#runs=r")
    page.locator(".answer.learning", has_text="held-out EM, greedy, before training to step 2").wait_for()
    page.get_by_role("tab", name="Evaluations").click()
    rows = page.locator(".evaluations.own tbody tr")
    rows.nth(1).wait_for()
    assert rows.count() == 2
    assert not page.errors
    page.close()


def test_a_step_says_how_much_of_it_is_shown_and_typing_changes_no_mean(browser, run):
    kept = [trajectory("a"), trajectory("b", right=False, answer="Arl"), trajectory("c", group="q2")]
    others = [
        {"uid": f"{group}-{n}", "group": f"g{group}", "reward": 0, "advantage": 0, "actions": []}
        for group in range(16)
        for n in range(5)
    ]
    httpx.post(f"{run}/v1/runs/r/steps", json={"step": 1, "trajectories": others}).raise_for_status()
    httpx.post(f"{run}/v1/runs/r/steps/1/samples", json={"trajectories": kept}).raise_for_status()
    page = opened(browser, f"{run}/runs/r/steps/1")
    page.locator("p.hint", has_text="2 of 16 groups of this step, 3 of 80 trajectories").wait_for()
    numbers = page.locator(".card", has=page.locator(".square.wrong")).locator("dl")
    whole = numbers.inner_text()
    assert "0.500" in whole
    page.get_by_label("Show").select_option("wrong")
    page.locator("p.hint", has_text="1 of 3 trajectories").wait_for()
    assert page.locator(".square").count() == 1 and numbers.inner_text() == whole
    assert not page.errors
    page.close()
