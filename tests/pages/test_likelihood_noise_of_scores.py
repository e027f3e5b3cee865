"""What page, report and terminal say of a held-out score that moved: of how many questions, and whether that
is more than their noise."""

from __future__ import annotations

import json

import httpx
import pytest
from chromium import CHROMIUM, browser, opened  # noqa: F401

from services.common.shares import change_interval, is_clear, wilson
from services.likelihood.evaluations import evaluation_event
from services.likelihood.exports.report import write_report
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from trainer.commands.work.in_words import run_in_words
from trainer.loop.run.reward_course import course_of_run

in_chromium = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]
REWARDS = (0.217, 0.15, 0.117)
CHANGE = "4 questions, {}0.250, 95 % interval {}0.32 to {}0.66"


def marked(test):
    for mark in in_chromium:
        test = mark(test)
    return test


@pytest.fixture
def url(tmp_path):
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "likelihood.db"), port=0))
    yield server.url
    server.stop()


def overall(score, n):
    return {"em": score, "f1": score, "n": n}


def posted(url, run, rewards, scores, n):
    """A run of these rewards, with a held-out score of `n` questions before it and after."""
    with httpx.Client(base_url=f"{url}/v1/runs/{run}") as http:
        for step, reward in enumerate(rewards, 1):
            http.post("/steps", json={"step": step, "metrics": {"reward/mean": reward}}).raise_for_status()
        for step, score in zip((0, len(rewards)), scores, strict=True):
            metrics = {"eval/em_greedy": score}
            event = evaluation_event(step, 0, f"step{step}", "greedy", overall(score, n), metrics)
            http.post("/events", json=event.model_dump()).raise_for_status()


def written(folder, rewards, scores, n):
    """The same as a run's folder."""
    folder.mkdir()
    rows = [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [
        {"event": "evaluation", "step": step, "tag": tag, "mode": "greedy", "overall": overall(score, n)}
        for step, tag, score in zip((0, len(rewards)), ("before", "after"), scores, strict=True)
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


@marked
def test_four_questions_say_nothing_of_learning_on_page_and_report(browser, url, tmp_path):
    posted(url, "few", REWARDS, (0.25, 0.5), 4)
    page = opened(browser, f"{url}/#runs=few")
    card = page.locator(".answer.learning")
    card.filter(has_text="4 questions").wait_for()
    said = card.inner_text()
    assert "no clear change held-out EM, greedy: 0.250 before training, 0.500 at step 3" in said
    assert CHANGE.format("+", "−", "+") in said
    apart = "the score +0.250 (not a clear change), the mean reward −0.100 between step 1 and step 3."
    assert apart in said
    assert not set("↑↓→") & set(said) and "up from" not in said
    page.close()
    report = browser.new_page()
    report.goto(
        write_report([written(tmp_path / "few", REWARDS, (0.25, 0.5), 4)], tmp_path / "r.html").as_uri()
    )
    assert report.locator(".answer.learning").inner_text() == said
    report.close()


@marked
def test_an_arrow_stands_for_a_change_that_is_more_than_noise(browser, url):
    posted(url, "fell", (0.1, 0.2, 0.3), (0.9, 0.2), 100)
    page = opened(browser, f"{url}/#runs=fell")
    card = page.locator(".answer.learning")
    card.filter(has_text="↓ 0.900 → 0.200 held-out EM, greedy, before training to step 3").wait_for()
    said = card.inner_text()
    assert "100 questions, −0.700, 95 % interval −0.78 to −0.58" in said
    assert "opposite ways: the score −0.700, the mean reward +0.200 between step 1 and step 3." in said
    page.close()


@marked
def test_of_a_score_without_a_number_of_questions_no_direction_is_said(browser, url):
    with httpx.Client(base_url=f"{url}/v1/runs/theirs") as http:
        for step in range(1, 25):
            metrics = {"reward/mean": 0.5, "eval/em_greedy": step / 100}
            http.post("/steps", json={"step": step, "metrics": metrics}).raise_for_status()
    page = opened(browser, f"{url}/#runs=theirs")
    card = page.locator(".answer.learning")
    line = "0.240 held-out EM, greedy, at step 24, 0.0100 at step 1: noise not known"
    card.filter(has_text=line).wait_for()
    assert not set("↑↓→") & set(card.inner_text())
    page.close()


@marked
def test_page_and_terminal_reckon_alike(browser, url):
    page = opened(browser, f"{url}/")
    for first, last, n in ((0.25, 0.5, 4), (0.0, 0.97, 200), (1.0, 1.0, 1), (0.555, 0.175, 200)):
        assert page.evaluate("(c) => Unspiral.changeInterval(...c)", [first, last, n]) == pytest.approx(
            change_interval(first, last, n), abs=1e-12
        )
        assert page.evaluate("(c) => Unspiral.wilson(...c)", [last, n]) == pytest.approx(wilson(last, n))
    page.close()


def test_the_intervals_are_those_of_the_published_examples():
    """Newcombe 1998 (Statistics in Medicine 17, 857-872), table I, method 3."""
    published = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0.0, 0.1611)}
    published |= {(1, 29): (0.0061, 0.1718)}
    for (right, n), interval in published.items():
        assert tuple(round(x, 4) for x in wilson(right / n, n)) == interval
    assert [round(x, 3) for x in change_interval(0.5, 0.5, 10**6)] == [-0.001, 0.001]
    assert not is_clear(change_interval(0.25, 0.5, 4)) and is_clear(change_interval(0.25, 0.5, 400))


def test_the_terminal_says_of_how_many_questions_and_what_the_reward_did(tmp_path):
    run = written(tmp_path / "few", REWARDS, (0.25, 0.5), 4)
    summary = {"steps": 3, "phase": "unknown", "seconds": 248, "em_before": 0.25, "em_after": 0.5}
    summary |= {"em_questions": 4, "reward": course_of_run(run / "metrics.jsonl")}
    assert run_in_words(summary).splitlines()[1:] == [
        "exact match on held-out questions, greedily: 0.250 before, 0.500 after "
        f"({CHANGE.format('+', '-', '+')}: no clear change)",
        "reward in training: 0.217 at step 1, 0.117 at step 3",
        "held-out score and reward went opposite ways: +0.250 and -0.100",
    ]
    better = summary | {"em_before": 0.0, "em_after": 0.985, "em_questions": 200}
    better["reward"] = {"first": {"steps": [1, 6], "mean": 0.2}, "last": {"steps": [7, 12], "mean": 0.7}}
    assert run_in_words(better).splitlines()[1:] == [
        "exact match on held-out questions, greedily: 0.000 before, 0.985 after "
        "(200 questions, +0.985, 95 % interval +0.95 to +0.99)",
        "reward in training: 0.200 at steps 1 to 6, 0.700 at steps 7 to 12",
    ]
    assert course_of_run(tmp_path / "none.jsonl") == {}
