"""The tab of evaluations in a real Chromium: ours above the papers' rows."""

from __future__ import annotations

import httpx
import pytest
from chromium import CHROMIUM, browser  # noqa: F401
from suite_rows import evaluation
from test_likelihood_step_page import opened, post

from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from trainer.suite.sets import SETS
from trainer.suite.shown.published import PUBLISHED
from trainer.suite.shown.tables import COLUMNS, HEADS

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A run with two evaluations, and one of an older version, which left a page alone."""
    run = tmp_path_factory.mktemp("runs") / "falls"
    (run / "eval").mkdir(parents=True)
    for name, share in (("search7-agent", 8), ("search7-rag", 3)):
        right = {one: [i < share for i in range(10)] for one in SETS}
        evaluation(run / "eval" / name, right, method=name.removeprefix("search7-"), model=HOSTILE)
    (run / "eval" / "old").mkdir()
    (run / "eval" / "old" / "table.html").write_text("<h1>old</h1>")
    server = serve_in_thread(ServeSettings(store=str(run / "likelihood.db"), port=0))
    post(server.url)
    yield server
    server.stop()


def test_the_tab_shows_all_evaluations_of_a_run_above_the_papers_rows(browser, server):
    page = opened(browser, f"{server.url}/#runs=falls")
    page.get_by_role("tab", name="Evaluations").click()
    page.wait_for_selector(".evaluations tbody tr")
    heads = page.locator(".evaluations thead th").all_inner_texts()
    assert heads == ["Exact match", *(HEADS[name] for name in COLUMNS)]
    parts = page.locator(".evaluations .part").all_inner_texts()
    assert parts[0] == "Measured, greedy, with bootstrap interval"
    assert parts[1:] == [
        f"As printed in {paper}, not measured here" for paper in dict.fromkeys(r.paper for r in PUBLISHED)
    ]
    rows = page.locator(".evaluations tbody tr:not(.part)").all_inner_texts()
    assert len(rows) == 2 + len(PUBLISHED)
    assert "falls, search7-agent" in rows[0] and f"{HOSTILE}, agent, 70 questions" in rows[0]
    assert rows[0].count(".800") == len(COLUMNS) and rows[1].count(".300") == len(COLUMNS)
    (llds,) = (r for r in rows if r.startswith("Qwen2.5-7B-Base") and "GRPO + LLDS" in r)
    assert " ".join(llds.split("\t")[1:]) == ".512 .672 .480 .555 .486 .469 .232 .508 .424 .480 –"
    panel = page.locator("#tab-evaluations")
    assert "Without a table to show: falls, old." in panel.inner_text()
    assert page.locator("#tab-evaluations img").count() == 0, "text stays text"
    page.get_by_role("link", name="falls, search7-rag").click()
    assert page.locator("h1").inner_text() == "Exact match on seven sets"
    page.close()


def test_a_run_without_evaluations_says_how_one_is_made_and_a_phone_does_not_scroll_sideways(browser, server):
    httpx.post(f"{server.url}/v1/runs/other/steps", json={"step": 0, "metrics": {}}).raise_for_status()
    page = opened(browser, f"{server.url}/#runs=other&tab=evaluations", 390, 844)
    page.locator("#tab-evaluations", has_text="unspiral eval --suite search7 makes one").wait_for()
    page.close()
    page = opened(browser, f"{server.url}/#runs=falls&tab=evaluations", 390, 844)
    page.wait_for_selector(".evaluations tbody tr")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for part in page.locator(".evaluations .part span").all():  # whose figures these are is never cut off
        box = part.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    page.close()
