"""The tab of evaluations in a real Chromium: ours above the papers' rows."""

from __future__ import annotations

import json

import httpx
import pytest
from chromium import CHROMIUM, browser, opened  # noqa: F401
from suite_rows import asked, evaluation, row
from test_likelihood_step_page import post

from services.likelihood.evaluations import evaluation_event
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
    rows = [row(asked("nq", i), "Rome" if i < 6 else "Oslo") for i in range(8)]
    (run / "eval" / "answers.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (run / "eval" / "protocol.json").write_text(json.dumps({"model": {"name": HOSTILE}, "method": "agent"}))
    server = serve_in_thread(ServeSettings(store=str(run / "likelihood.db"), port=0))
    post(server.url)
    yield server
    server.stop()


def test_the_tab_shows_all_evaluations_of_a_run_above_the_papers_rows(browser, server):
    page = opened(browser, f"{server.url}/#runs=falls")
    page.get_by_role("tab", name="Evaluations").click()
    page.wait_for_selector(".evaluations tbody tr")
    sets = page.locator("section.panel", has=page.get_by_role("heading", name="Seven question sets"))
    heads = sets.locator("thead th").all_inner_texts()
    assert heads == ["Exact match", *(HEADS[name] for name in COLUMNS)]
    parts = sets.locator(".part").all_inner_texts()
    assert parts[0] == "Measured, greedy, with bootstrap interval"
    assert parts[1:] == [
        f"As printed in {paper}, not measured here" for paper in dict.fromkeys(r.paper for r in PUBLISHED)
    ]
    rows = sets.locator("tbody tr:not(.part)").all_inner_texts()
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


def test_own_questions_stand_in_the_tab_and_lead_to_their_answers(browser, server):
    page = opened(browser, f"{server.url}/#runs=falls&tab=evaluations")
    own = page.locator(
        "section.panel", has=page.get_by_role("heading", name="Own questions, by unspiral eval")
    )
    own.wait_for()
    (told,) = own.locator("tbody tr").all_inner_texts()
    assert "falls, answers" in told and HOSTILE in told and "0.750" in told and "0.409–0.929" in told
    own.get_by_role("link", name="falls, answers").click()
    assert page.locator(".answers-read > li").count() == 8 and page.locator("main img").count() == 0
    page.get_by_role("link", name="wrong 2").click()
    page.locator(".answers-read summary").first.click()
    assert page.locator(".answers-read .said").first.inner_text().strip().endswith("<answer> Oslo </answer>")
    page.get_by_role("link", name="evaluations of falls").click()
    assert page.locator("h2").first.inner_text() == "Own questions, by unspiral eval"
    assert page.errors == []
    page.close()


def test_rows_of_training_lead_to_their_answers_where_these_were_kept(browser, tmp_path):
    run = tmp_path / "mine"
    (run / "trajectories").mkdir(parents=True)
    segments = [{"by": "model", "text": "<answer> Rome </answer>"}]
    answer = {"question": "where?", "golden_answers": ["Rome"], "reward": 1.0, "segments": segments}
    (run / "trajectories" / "eval_after_greedy.jsonl").write_text(json.dumps(answer) + "\n")
    with serve_in_thread(ServeSettings(store=str(run / "likelihood.db"), port=0)) as server:
        httpx.post(f"{server.url}/v1/runs/mine/steps", json={"step": 12, "metrics": {}}).raise_for_status()
        for mode in ("greedy", "sampled"):
            event = evaluation_event(12, 0, "after", mode, {"em": 1.0, "n": 1}, {})
            httpx.post(f"{server.url}/v1/runs/mine/events", json=event.model_dump()).raise_for_status()
        page = opened(browser, f"{server.url}/#runs=mine&tab=evaluations")
        rows = page.locator(".evaluations.own tbody tr")
        rows.nth(1).wait_for()
        assert [row.locator("a").count() for row in rows.all()] == [0, 1]
        assert "1.000" in rows.nth(1).inner_text()
        page.get_by_role("link", name="mine, step 12").click()
        assert page.locator("h2").first.inner_text() == "step 12, greedy: held-out questions of mine"
        assert page.locator(".answers-read > li").count() == 1 and page.errors == []
        page.close()


def test_held_out_scores_that_another_trainer_posts_are_in_the_tab(browser, server):
    run = f"{server.url}/v1/runs/theirs"
    httpx.post(f"{run}/steps", json={"step": 7, "metrics": {}}).raise_for_status()
    data = {"metrics": {"eval/em_greedy": 0.25, "val/loss": 3.0}}
    event = {"step": 7, "kind": "evaluation", "text": "held out", "data": data}
    httpx.post(f"{run}/events", json=event).raise_for_status()
    page = opened(browser, f"{server.url}/#runs=theirs&tab=evaluations", 1440, 900)
    row = page.locator("#tab-evaluations tbody tr", has_text="theirs, step 7")
    row.wait_for()
    cells = [cell.strip() for cell in row.locator("td").all_inner_texts()]
    assert cells[:2] == ["greedy", "0.250"] and page.errors == []
    assert "No held-out score was posted" not in page.locator("#tab-evaluations").inner_text()
    page.close()


def test_a_run_without_evaluations_says_how_one_is_made_and_a_phone_does_not_scroll_sideways(browser, server):
    httpx.post(f"{server.url}/v1/runs/other/steps", json={"step": 0, "metrics": {}}).raise_for_status()
    page = opened(browser, f"{server.url}/#runs=other&tab=evaluations", 390, 844)
    page.locator("#tab-evaluations", has_text="unspiral eval --suite search7 makes one").wait_for()
    other = page.locator("#runs tbody tr", has_text="falls").locator("td[data-label='Step'] a")
    other.wait_for()  # a run that is not drawn leads to its last step, too
    page.close()
    page = opened(browser, f"{server.url}/#runs=falls&tab=evaluations", 390, 844)
    page.wait_for_selector(".evaluations tbody tr")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for part in page.locator(".evaluations .part span").all():  # whose figures these are is never cut off
        box = part.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    page.close()
