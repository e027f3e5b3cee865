"""A step at which nothing was updated, in a real Chromium: the legend says why no token is pulled up, on the
live page and in the report; and what a link scrolls to lies below the page's head."""

from __future__ import annotations

import json

import httpx
import pytest
from chromium import CHROMIUM, browser, opened, until  # noqa: F401
from microscope_world import trajectory

from services.likelihood.exports.report import write_report
from services.likelihood.rest.launch import ServeSettings, serve_in_thread

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
ALL_EQUAL = {"learner/optimiser_steps": 0.0, "llds/lambda": 0.2, "groups/zero_variance": 1.0}
NONE = "nothing was updated at this step"
STEPS = 12


def asked(url, metrics):
    httpx.post(f"{url}/v1/runs/still/steps", json={"step": 1, "metrics": metrics}).raise_for_status()
    return httpx.get(f"{url}/v1/runs/still/steps/1/samples").json()["untouched"]


@pytest.fixture
def server(tmp_path):
    with serve_in_thread(ServeSettings(store=str(tmp_path / "still" / "likelihood.db"), port=0)) as server:
        yield server


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        (ALL_EQUAL, f"{NONE}: all advantages are 0"),
        (ALL_EQUAL | {"groups/zero_variance": 0.5}, NONE),
        (ALL_EQUAL | {"learner/skipped": 1.0}, f"{NONE}: its gradient was not finite"),
        (ALL_EQUAL | {"llds/lambda": 0.0, "learner/optimiser_steps": 2.0}, "it is off (lambda 0)"),
        (ALL_EQUAL | {"learner/optimiser_steps": 2.0}, None),
        ({"x": 1.0}, None),
    ],
)
def test_the_reason_is_that_of_the_steps_metrics(server, metrics, why):
    assert asked(server.url, metrics) == why


def test_page_and_report_say_why_and_a_step_of_the_table_is_scrolled_to_below_the_head(
    browser, server, tmp_path
):
    folder = tmp_path / "still"
    rows = [{"step": s, "reward/mean": 1.0, **ALL_EQUAL} for s in range(1, STEPS + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = [trajectory(f"t{i}", advantage=0.0, after=False) for i in range(2)]
    for segment in (segment for one in made for segment in one["segments"]):
        segment.pop("held", None)
    for row in rows:
        metrics = {name: value for name, value in row.items() if name != "step"}
        body = {"step": row["step"], "metrics": metrics}
        httpx.post(f"{server.url}/v1/runs/still/steps", json=body).raise_for_status()
        body = {"trajectories": made}
        httpx.post(f"{server.url}/v1/runs/still/steps/{row['step']}/samples", json=body).raise_for_status()
    for url in (
        f"{server.url}/runs/still/steps/{STEPS}",
        write_report([folder], folder / "report.html").as_uri(),
    ):
        page = opened(browser, url)
        page.get_by_text(f"LLDS pulls no token up here: {NONE}: all advantages are 0").wait_for()
        if url.startswith("file"):
            page.locator("#runs tbody td[data-label='Step'] a").first.click()
            until(page, "scrollY > 100")
            place = "(e) => e.getBoundingClientRect()"
            head, panel = page.locator("header.top"), page.locator("#sample-panel")
            assert panel.evaluate(place)["top"] >= head.evaluate(place)["bottom"] - 1
            assert page.locator("#sample-choice select").is_visible()
        assert page.errors == []
        page.close()
