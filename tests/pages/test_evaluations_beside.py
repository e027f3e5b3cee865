"""Two evaluations question by question, in a real Chromium: what turned right, what turned wrong."""

from __future__ import annotations

import json
import os
from contextlib import closing
from datetime import UTC, datetime

import httpx
import pytest
from chromium import CHROMIUM, browser, closed_well, opened  # noqa: F401

from services.common.shares import paired_interval
from services.likelihood.evaluations import evaluation_event
from services.likelihood.records import StepRecord
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from services.likelihood.store.sqlite.store import SQLiteStore

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
MADE = 1_764_412_800.0
ARABIC = "ما هي عاصمة فرنسا ؟"
BEFORE, AFTER = "eval_before_greedy", "eval_step3_greedy"


def asked(number, right, source="one", question=None):
    written = [
        {"by": "model", "text": f"<think> t{number} </think><answer> {'yes' if right else 'no'} </answer>"}
    ]
    return {
        "question": question or f"question {number} <b>?</b>",
        "golden_answers": ["yes"],
        "data_source": source,
        "reward": float(right),
        "finish": "answer",
        "segments": written,
        "answer": "yes" if right else "no",
    }


def kept(folder, name, rows):
    file = folder / "trajectories" / f"{name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(file, (MADE + 9e6, MADE + 9e6))  # as a copy has it


def trained(runs, name, after):
    """A run of which ten questions were asked before training, and after step 3."""
    folder = runs / name
    folder.mkdir(parents=True)
    before = [i < 2 for i in range(10)]
    with closing(SQLiteStore(str(folder / "likelihood.db"))) as store:
        for step in (1, 2, 3):
            store.put_step(name, StepRecord(step=step, metrics={"reward/mean": 0.5}))
        events = []
        for step, tag, right in ((0, "before", before), (3, "step3", after)):
            rows = [
                asked(i, one, "one" if i < 5 else "two", ARABIC if i == 4 else None)
                for i, one in enumerate(right)
            ]
            # The order of a file is no matter: questions are paired by their words.
            kept(folder, f"eval_{tag}_greedy", rows if step else rows[::-1])
            em = sum(right) / 10
            overall = {"em": em, "f1": em, "n": 10}
            event = evaluation_event(step, 0, tag, "greedy", overall, {"eval/em_greedy": em})
            store.put_event(name, event)
            sources = {"one": {"em": 0.0, "f1": 0.125}, "two": {"em": 0.0, "f1": 0.375}}
            line = {"event": "evaluation", "step": step, "tag": tag, "mode": "greedy"} | {"sources": sources}
            events.append(json.dumps(line))
        (folder / "events.jsonl").write_text("not json\n" + "\n".join(events) + "\n")
    return folder


# Where a text is drawn, which may lie beyond its box.
DRAWN = """(element) => { const range = document.createRange();
  range.selectNodeContents(element);
  return range.getBoundingClientRect().toJSON(); }"""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    runs = tmp_path_factory.mktemp("beside") / "runs"
    trained(runs, "a", [i >= 1 for i in range(10)])  # question 0 was lost
    trained(runs, "b", [True] * 10)
    server = serve_in_thread(ServeSettings(store=str(runs), port=0))
    yield server.url
    server.stop()


@pytest.mark.parametrize("width", [1440, 390])
def test_the_list_leads_to_what_turned_and_on_to_both_answers(browser, url, width):
    page = opened(browser, f"{url}/runs/a/evaluations", width)
    page.get_by_role("link", name="before training → step 3, greedy").click()
    page.get_by_role("heading", name="before training, greedy → step 3, greedy: questions of a").wait_for()
    low, high = paired_interval(1, 1, 8, 0)
    said = "↑ up from 0.200 to 0.900 on the 10 questions of both: +0.700, "
    said += f"95 % interval +{low:.3f} to +{high:.3f}, of the pairs."
    assert page.locator(".change-said").inner_text() == said
    rows = page.locator(".pairs > li")
    assert [text.split("\n")[0] for text in rows.all_inner_texts()][:2] == [
        "✓→✗ turned wrong",
        "✗→✓ turned right",
    ]
    assert rows.count() == 10 and "question 0 <b>?</b>" in rows.first.inner_text()
    text, question = (
        rows.first.locator(f"summary {one}").evaluate(DRAWN) for one in (".verdict", ".question")
    )
    beside = text["right"] <= question["left"]
    assert beside or text["bottom"] <= question["top"], "the verdict lies over the question"
    assert page.get_by_text("unspiral trajectories diff a eval_before_greedy eval_step3_greedy").is_visible()
    page.get_by_role("link", name="turned wrong 1").click()
    assert page.locator(".pairs > li").count() == 1
    if width > 700:
        verdict = page.locator(".pairs summary > :first-child").first
        end = verdict.evaluate("v => v.getBoundingClientRect().left + v.scrollWidth")
        question = page.locator(".pairs .question").first.bounding_box()
        assert end <= question["x"], "the verdict runs into the question"
    # The whole way by the keyboard.
    page.locator(".pairs summary").focus()
    page.keyboard.press("Enter")
    sides = page.locator(".both section")
    assert [side.split("\n")[0] for side in sides.all_inner_texts()] == [
        "before training, greedy",
        "step 3, greedy",
    ]
    first, last = (sides.nth(i).bounding_box() for i in (0, 1))
    assert (first["y"] == last["y"]) == (width > 700), "beside each other, on a phone below"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    sides.nth(0).get_by_role("link", name="this answer alone").focus()
    page.keyboard.press("Enter")
    page.locator("#opened details[open] .question", has_text="question 0 <b>?</b>").wait_for()
    assert page.locator("#opened .verdict").inner_text() == "✓ right"
    assert page.locator("#opened").evaluate("row => row.getBoundingClientRect().top < innerHeight - 40")
    closed_well(page)


def test_sources_words_and_writing_from_right_to_left(browser, url):
    page = opened(browser, f"{url}/runs/a/evaluations/{AFTER}/beside?before={BEFORE}")
    page.get_by_role("link", name="two", exact=True).click()
    assert page.locator(".pairs > li").count() == 5
    page.get_by_role("link", name="every source").click()
    page.get_by_label("Search questions and answers").fill("فرنسا")
    page.get_by_role("button", name="Search").click()
    question = page.locator(".pairs .question")
    question.filter(has_text=ARABIC).wait_for()
    assert question.evaluate("one => getComputedStyle(one).direction") == "rtl"
    closed_well(page)


def test_the_same_evaluation_of_another_run_can_stand_before(browser, url):
    page = opened(browser, f"{url}/runs/a/evaluations/{AFTER}")
    (event,) = [e for e in httpx.get(f"{url}/v1/runs/a/events").json() if e["step"] == 3]
    made = datetime.fromtimestamp(event["time"], UTC)
    assert f"; {made:%Y-%m-%d %H:%M} UTC" in page.locator(".under").inner_text(), "not that of the file"
    assert httpx.get(f"{url}/v1/runs/a/evaluations/{AFTER}").json()["made"] == event["time"]
    numbers = page.locator(".listed tbody td[data-label=F1]").all_inner_texts()
    assert numbers == ["0.900", "0.125", "0.375"], "F1 of each source is in the run's events"
    choice = page.get_by_label("Question by question, beside:")
    assert choice.locator("option").all_inner_texts() == ["before training, greedy", "b: step 3, greedy"]
    choice.select_option("b: step 3, greedy")
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("heading", name="questions of b and a").wait_for()
    assert page.get_by_role("link", name="turned wrong 1").is_visible()
    assert page.locator(".change-said strong").inner_text() == "no clear change"
    assert not page.get_by_text("In a terminal:").count(), "no command compares two runs' trainings"
    page.get_by_label("Before:").select_option("before training, greedy")
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("heading", name="before training, greedy → step 3, greedy: questions of a").wait_for()
    closed_well(page)


def test_the_tab_leads_there_too(browser, url):
    page = opened(browser, f"{url}/#runs=a&tab=evaluations")
    page.get_by_role("link", name="a, before training → step 3, greedy").click()
    page.get_by_role("heading", name="questions of a").wait_for()
    closed_well(page)


@pytest.mark.parametrize("before", ["nope", "c/eval_step3_greedy", "../eval_before_greedy", "..", "/etc"])
def test_what_is_not_there_is_said(url, before):
    answer = httpx.get(f"{url}/runs/a/evaluations/{AFTER}/beside", params={"before": before})
    assert answer.status_code == 404 and ("has no evaluation" in answer.text or "No run" in answer.text)


def test_own_questions_have_the_command_that_compares_them(tmp_path):
    folder = trained(tmp_path / "runs", "a", [True] * 10)
    for name, right, template in (("plain", False, "lab"), ("tuned", True, "search_r1")):
        row = {"key": "k", "sample": 0, "set": "s", "id": "k", "question": "q?", "golden_answers": ["yes"]}
        row |= {"answer": "yes" if right else None, "scores": {"em": float(right), "f1": float(right)}}
        row |= {"finish": "answer", "searches": [], "text": "t"}
        file = folder / "eval" / f"{name}.answers.jsonl"
        file.parent.mkdir(exist_ok=True)
        alone = row | {"key": "l", "question": f"{name}?"}
        file.write_text(json.dumps(row) + "\n" + json.dumps(alone) + "\n")
        about = {"method": "agent", "model": {"name": name}, "protocol": {"template": template}}
        file.with_name(f"{name}.protocol.json").write_text(json.dumps(about))
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "runs"), port=0))
    try:
        text = httpx.get(f"{server.url}/runs/a/evaluations/tuned/beside?before=plain").text
        assert "unspiral eval compare a/eval/plain.answers.jsonl a/eval/tuned.answers.jsonl" in text
        assert "Asked differently: protocol.template: lab → search_r1" in text
        assert "1 question is in plain alone, and left out." in text
        assert "<b>no answer</b> → <b>yes</b>" in text
        none = httpx.get(f"{server.url}/runs/a/evaluations/tuned/beside?before={BEFORE}").text
        assert "No question with the same words and accepted answers is in both." in none
    finally:
        server.stop()


def test_the_interval_of_pairs_is_newcombes():
    low, high = paired_interval(36, 2, 12, 0)
    assert (round(low, 4), round(high, 4)) == (0.0569, 0.3404), "of his example"
    assert paired_interval(0, 0, 0, 4) == pytest.approx((-0.4899, 0.4899), abs=1e-4)
