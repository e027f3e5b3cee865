"""Words, colours and axes of the pages in a real Chromium: they say what was measured, and no more."""

from __future__ import annotations

import json

import httpx
import pytest
from chromium import CHROMIUM, browser, opened, until  # noqa: F401
from microscope_world import trajectory
from playwright.sync_api import expect
from test_likelihood_axis_labels import LABELS_OF, RECORD

from services.likelihood.exports.report import write_report
from services.likelihood.rest.launch import ServeSettings, serve_in_thread

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
OPTIMISER_STEPS = 8
COLOURS = "(e) => [...e.querySelectorAll('.legend line')].map((l) => l.getAttribute('stroke'))"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report of three steps after an evaluation, without a reference policy."""
    folder = tmp_path_factory.mktemp("run")
    active = {f"llds/active_tokens_step_{n}": float(n) for n in range(OPTIMISER_STEPS)}
    metrics = {"reward/mean": 0.5, "kl/old": 0.01, "logp/right": -0.5, "grad_norm": 1.0} | active
    rows = [json.dumps({"step": step} | metrics) for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    before = {"time": 1.0, "event": "evaluation", "step": 0, "tag": "before", "mode": "greedy", "em": 0.25}
    (folder / "events.jsonl").write_text(json.dumps(before) + "\n")
    return write_report([folder], folder / "report.html").as_uri()


def figure(page, title):
    return page.locator("figure", has=page.get_by_text(title, exact=True))


def test_a_chart_names_the_reference_only_where_there_is_one(browser, report):
    page = opened(browser, report)
    expect(figure(page, "KL to the policy before the update")).to_contain_text("old policy")
    expect(figure(page, "KL to the reference")).to_be_hidden()
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_of_many_lines_has_a_colour_of_its_own(browser, report, scheme):
    page = opened(browser, report, color_scheme=scheme)
    chart = figure(page, "Active tokens by optimiser step")
    expect(chart.locator(".legend button")).to_have_count(OPTIMISER_STEPS)
    colours = chart.evaluate(COLOURS)
    channels = [[int(c[k : k + 2], 16) for k in (1, 3, 5)] for c in colours]
    apart = [
        sum(abs(x - y) for x, y in zip(one, other, strict=True))
        for i, one in enumerate(channels)
        for other in channels[:i]
    ]
    assert min(apart) > 40
    labels = chart.locator(".legend button").all_inner_texts()
    assert [text.split()[:2] for text in labels] == [["step", str(n)] for n in range(OPTIMISER_STEPS)]
    page.close()


def test_an_axis_of_steps_has_whole_numbers(browser, report):
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.add_init_script(RECORD)
    page.goto(report)
    until(page, "window.drawn.length > 0")
    texts = [label["text"] for label in page.evaluate(LABELS_OF, "Gradient norm")]
    assert {"1", "2", "3"} <= set(texts) and not {"1.5", "2.5"} & set(texts)
    page.close()


def test_a_score_from_before_the_first_step_is_called_so_in_a_report(browser, report):
    page = opened(browser, report)
    expect(page.locator(".answer.learning")).to_contain_text(
        "0.250 held-out EM, greedy, before training, the only score so far"
    )
    page.close()


def test_on_a_phone_all_but_the_first_groups_of_curves_are_folded(browser, report):
    page = opened(browser, report, 390, 844)
    expect(figure(page, "Reward")).to_be_visible()
    chart = figure(page, "Gradient norm")
    expect(chart).to_be_hidden()
    page.get_by_role("heading", name="Update", exact=True).click()
    expect(chart.locator("canvas")).to_be_visible()
    assert chart.locator("canvas").bounding_box()["width"] > 250
    page.get_by_role("heading", name="Update", exact=True).click()
    expect(chart).to_be_hidden()
    page.evaluate("Unspiral.fullScreen('Gradient norm')")
    expect(chart.locator("canvas")).to_be_visible()
    assert page.errors == []
    page.close()
    page = opened(browser, report)
    expect(figure(page, "Gradient norm")).to_be_visible()
    page.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = serve_in_thread(ServeSettings(store=str(tmp_path_factory.mktemp("words") / "l.db"), port=0))
    own = {
        "function": "my.parts:partial",
        "answer": "Holcmouth",
        "normalized": "holcmouth",
        "golden": [{"text": "Ines Tobar", "normalized": "ines tobar", "equal": False}],
    }
    kept = trajectory("own", reward=0.3, right=True, scoring=own, fall=-0.1)
    match = trajectory("match", right=False, answer="Arl")
    f1 = trajectory("f1", right=False, answer="Oda Merl")
    f1["scoring"]["function"] = "f1"
    body = {"trajectories": [kept, match, f1]}
    httpx.post(f"{server.url}/v1/runs/r/steps/1/samples", json=body).raise_for_status()
    yield server
    server.stop()


def test_the_microscope_says_what_is_known_of_a_reward(browser, server):
    page = opened(browser, f"{server.url}/runs/r/steps/1#group=q1&a=own&b=match")
    own, match = page.locator(".side .reward").first, page.locator(".side .reward").last
    expect(own.locator("h4")).to_have_text("Reward 0.300 by my.parts:partial")
    expect(own.locator(".note")).to_contain_text("my.parts:partial gave 0.300")
    expect(own.locator(".note")).to_contain_text("its parts are unknown")
    expect(own.locator(".note")).to_contain_text("exact match of the answer")
    expect(own).to_contain_text("≠ differs")
    expect(match.locator("h4")).to_have_text("Why reward 0 by em")
    expect(match.locator(".note")).to_have_count(0)
    page.get_by_label("f1 as B").check()
    expect(page.locator(".side .reward").last.locator("h4")).to_have_text("Reward 0 by f1")
    page.close()


def test_the_microscope_tells_preserved_from_pulled_up(browser, server):
    page = opened(browser, f"{server.url}/runs/r/steps/1#group=q1&a=own&b=match")
    expect(page.locator(".side .note").first).to_contain_text(
        "preserved by LLDS: it pulls up 0 of its 9 tokens"
    )
    expect(page.locator(".side").last).to_contain_text("not preserved by LLDS")
    row = page.locator("tr[data-uid=own]")
    expect(page.locator(".trajectories th", has_text="LLDS pulls up")).to_have_count(1)
    expect(row).to_contain_text("0 of 9")
    page.close()
