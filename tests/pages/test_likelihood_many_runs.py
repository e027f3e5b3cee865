"""Many runs with long names on the live page, in a real Chromium: all told apart, none dropped unsaid."""

from __future__ import annotations

import re
from contextlib import closing

import pytest
from chromium import CHROMIUM, browser, closed_well, opened  # noqa: F401
from playwright.sync_api import expect

from services.likelihood.evaluations import evaluation_event
from services.likelihood.records import StepRecord
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from services.likelihood.store.sqlite.store import SQLiteStore

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
NAMES = [
    f"qwen2.5-3b-search_r1-llds-lambda-0.1-lr-1e-6-seed-{n:03d}-host-with-eight-gpus-of-80-gib"
    for n in range(60)
]
DRAWN = 8


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    store = str(tmp_path_factory.mktemp("many") / "likelihood.db")
    with closing(SQLiteStore(store)) as kept:
        for i, name in enumerate(NAMES):
            for step in (1, 2):
                kept.put_step(name, StepRecord(step=step, metrics={"reward/mean": 0.1 + i / 100}))
            scores = {"em": 0.5, "f1": 0.625, "n": 200}
            kept.put_event(name, evaluation_event(2, 0, "after", "greedy", scores, {"eval/em_greedy": 0.5}))
    server = serve_in_thread(ServeSettings(store=store, port=0))
    yield server.url
    server.stop()


@pytest.mark.parametrize("width", [1440, 390])
def test_long_names_are_told_apart_and_fit(browser, url, width):
    page = opened(browser, f"{url}/#runs={','.join(NAMES[:3])}", width)
    key = page.locator("#run-key li")
    expect(key).to_have_text(["…seed-000…", "…seed-001…", "…seed-002…"])
    assert key.nth(2).get_attribute("title") == NAMES[2]
    legend = page.locator("figure", has=page.get_by_text("Held-out score", exact=True)).locator(
        ".legend button"
    )
    expect(legend).to_have_text([re.compile(rf"^…seed-00{n}…0\.500") for n in range(3)])
    expect(page.get_by_label("Draw").locator("option")).to_have_text(
        ["as they are", *(f"minus …seed-00{n}…" for n in range(3))]
    )
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    closed_well(page)


def test_names_that_are_short_or_share_nothing_stay_whole(browser, url):
    page = opened(browser, f"{url}/#runs={NAMES[0]}")
    page.locator("#run-key li").wait_for()
    apart = """names => {
      const runs = names.map((run) => ({ run }));
      return runs.map((run) => Unspiral.apart(run, runs)); }"""
    long = "a-run-of-more-than-thirty-characters"
    for names in (["demo-0", "demo-1"], [long], [long, long], [long, "b-" + long[2:-2]]):
        assert page.evaluate(apart, names) == names
    assert page.evaluate(apart, [f"{long}-lr-1", f"{long}-lr-1-seed-2"]) == ["…lr-1", "…lr-1-seed-2"]
    closed_well(page)


def test_a_ninth_run_is_not_dropped_without_a_word(browser, url):
    page = opened(browser, f"{url}/#runs={','.join(NAMES[: DRAWN + 1])}")
    said = page.locator("#no-such-run")
    expect(said).to_have_text(f"{DRAWN} runs are drawn at once, no more: {NAMES[DRAWN]} is not.")
    ninth = page.get_by_role("checkbox", name=NAMES[DRAWN])
    expect(ninth).to_be_disabled()
    page.get_by_role("checkbox", name=NAMES[0]).click()
    expect(said).to_be_hidden()
    ninth.click()
    expect(page.locator("#run-key li")).to_have_count(DRAWN)
    page.goto("about:blank")
    page.goto(f"{url}/#runs={','.join(NAMES)}")
    expect(said).to_have_text(f"{DRAWN} runs are drawn at once, no more: 52 others are not.")
    closed_well(page)


def test_scores_on_a_phone_are_cards_of_which_nothing_lies_beside_the_window(browser, url):
    page = opened(browser, f"{url}/#runs={NAMES[0]}&tab=evaluations", 390)
    cells = page.locator(".evaluations.own tbody td")
    cells.nth(4).wait_for()
    labels = [cell.get_attribute("data-label") for cell in cells.all()]
    assert labels == ["Mode", "Exact match", "F1", "Questions", "Made, UTC"]
    assert all(
        box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in (c.bounding_box() for c in cells.all())
    )
    closed_well(page)
