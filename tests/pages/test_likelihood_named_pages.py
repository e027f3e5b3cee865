"""Each page says which run it is of, that a run is not there, and the way back."""

from __future__ import annotations

import json

import httpx
import pytest
from chromium import CHROMIUM, browser, until  # noqa: F401
from suite_rows import evaluation

from services.likelihood.exports.report import write_report
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from trainer.suite.sets import SETS

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]


@pytest.fixture
def url(tmp_path):
    own = tmp_path / "demo-0"
    evaluation(own / "eval" / "search7-rag", {one: [True, False] for one in SETS})
    server = serve_in_thread(ServeSettings(store=str(own / "likelihood.db"), port=0))
    for run in ("demo-0", "other"):
        post(server.url, run)
    yield server.url
    server.stop()


def post(url, run, step=1):
    body = {"step": step, "metrics": {"reward/mean": 0.5}}
    httpx.post(f"{url}/v1/runs/{run}/steps", json=body).raise_for_status()


@pytest.fixture
def page(browser):
    page = browser.new_page()
    page.set_default_timeout(60_000)
    yield page
    page.close()


def test_the_title_names_the_runs_of_page_and_report(page, url, tmp_path):
    page.goto(f"{url}/#runs=demo-0")
    until(page, "document.title === 'demo-0: Unspiral'")
    page.goto(f"{url}/?two#runs=demo-0,other")
    until(page, "document.title === 'demo-0, other: Unspiral'")
    folder = tmp_path / "a <b>"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    report = write_report([folder], tmp_path / "report.html")
    assert "<title>a &lt;b&gt;: Unspiral</title>" in report.read_text()
    page.goto(report.as_uri())
    until(page, "document.title === 'a <b>: Unspiral'")


def test_an_unknown_run_is_said_to_be_unknown_and_no_other_takes_its_place(page, url):
    page.goto(f"{url}/#runs=nosuch")
    page.get_by_text("No run nosuch in this store. Choose one below.").wait_for()
    assert page.locator(".answers").count() == 0 and page.url.endswith("#runs=nosuch")
    post(url, "other", 2)  # the page hears of it, and stays with what it was asked for
    page.locator("#runs tbody tr", has_text="other").locator("td[data-label='Step']", has_text="2").wait_for()
    assert page.locator(".answers").count() == 0
    post(url, "nosuch")  # the run begins
    page.locator(".answers[data-run='nosuch']").wait_for()
    assert page.locator("#no-such-run").is_hidden()
    page.goto(f"{url}/?two#runs=other,gone")
    page.get_by_text("No run gone in this store.").wait_for()
    page.locator(".answers[data-run='other']").wait_for()


@pytest.mark.parametrize("path", ["steps/1", "prompts"])
def test_a_page_of_an_unknown_run_says_what_the_service_said(page, url, path):
    page.goto(f"{url}/runs/nosuch/{path}")
    page.locator("#status", has_text="run 'nosuch': not in this store").wait_for()
    assert "did not answer" not in page.locator("#status").inner_text()


def test_the_evaluations_of_a_run_lead_back_to_it(page, url):
    page.goto(f"{url}/runs/demo-0/evaluations")
    assert page.title() == "Evaluations of demo-0: Unspiral"
    page.get_by_role("link", name="search7-rag").click()
    page.get_by_role("link", name="← evaluations of demo-0").click()
    page.get_by_role("link", name="← run demo-0").click()
    page.locator(".answers[data-run='demo-0']").wait_for()


def test_a_run_may_be_named_before_the_sharp_sign_too(page, url):
    page.goto(f"{url}/?run=nosuch")
    page.get_by_text("No run nosuch in this store. Choose one below.").wait_for()
    assert page.locator(".answers").count() == 0
    page.goto(f"{url}/?run=other")
    page.locator(".answers[data-run='other']").wait_for()
    until(page, "location.search === '' && location.hash === '#runs=other'")
    page.goto(f"{url}/runs/demo-0")
    page.locator(".answers[data-run='demo-0']").wait_for()


def test_a_step_of_which_nothing_is_kept_says_what_the_last_step_is(page, url):
    page.goto(f"{url}/runs/other/steps/99")
    page.get_by_text(
        "No trajectories of step 99 are kept token by token. The run's last step is 1."
    ).wait_for()


def test_the_prompts_of_a_run_that_keeps_none_are_read_to_the_end(page, url):
    page.goto(f"{url}/runs/other/prompts")
    page.get_by_text("No trajectory of this run is kept token by token:").wait_for()
    assert page.locator("#status").inner_text() == "other" and page.locator("#choice").is_hidden()
