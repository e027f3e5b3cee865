"""The live page's views in a real Chromium: the first screen, the address, differences, the
list of runs."""

from __future__ import annotations

import csv
import json
import random
import re
import time
from pathlib import Path

import chromium
import httpx
import pytest
from chromium import CHROMIUM, browser  # noqa: F401
from places import DATA
from playwright.sync_api import expect

from services.likelihood.exports.report import write_report
from services.likelihood.rest.launch import ServeSettings, serve_in_thread

LAB = DATA / "lab"
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
HOSTILE = "<img src=x onerror=alert(1)>"
STEPS = 45
# What the page says of a run one second after its last step, by the service's clock.
SOON_AFTER = """() => { const { app, source } = Unspiral;
  source.ahead = app.loaded[0].last_step_time + 1 - Date.now() / 1000;
  Unspiral.drawFirst(app.loaded);
  return document.querySelector(".answer.doing").innerText; }"""

STATUS_AFTER = """(seconds) => { const { app, source } = Unspiral;
  source.ahead = app.loaded[0].last_step_time + seconds - Date.now() / 1000;
  app.tellStatus();
  return document.getElementById("status").textContent; }"""


def post(server, run, first, last, change=0.0):
    rows = [json.loads(line) for line in (LAB / "grpo_2.jsonl").read_text().splitlines()]
    with httpx.Client(base_url=server.url) as http:
        for row in rows[first:last]:
            numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
            numbers |= {
                "reward/mean": numbers["reward/mean"] + change,
                "own/one": 1.0,
                "own/=two": -2.0,
                "time/step": 2.0,
            }
            body = {"step": row["step"], "metrics": numbers}
            http.post(f"/v1/runs/{run}/steps", json=body).raise_for_status()


def change(server, method, path, body=None, headers=None):
    answer = httpx.request(method, f"{server.url}/v1/runs/{path}", json=body, headers=headers)
    answer.raise_for_status()
    return answer.json()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = serve_in_thread(ServeSettings(store=str(tmp_path_factory.mktemp("views") / "l.db"), port=0))
    post(server, "low", 0, STEPS)
    post(server, "high", 0, STEPS, change=0.25)
    about = {"config": {"seed": 1, "note": HOSTILE}, "steps": 200, "started": time.time() - 60}
    change(server, "POST", "low/about", about)
    other = {"config": {"seed": 2, "note": HOSTILE}, "ended": time.time() - 5, "exit": 3}
    change(server, "POST", "high/about", other)
    yield server
    server.stop()


@pytest.fixture
def opened(browser):
    """Opens the page, and sees afterwards that no script failed and nothing came from elsewhere."""
    pages = []

    def open_at(url, width=1440):
        page = chromium.opened(browser, url, width)
        page.set_default_timeout(60_000)
        page.wait_for_selector(".status.live")
        pages.append(page)
        return page

    yield open_at
    for page in pages:
        chromium.closed_well(page)


def test_a_reward_that_rose_and_fell_is_said_to_have_fallen_from_its_best(server, opened):
    noise = (0.0, 0.01, -0.01)
    rewards = [0.30 + 0.0075 * min(i, 90 - i) + noise[i % 3] for i in range(80)]
    with httpx.Client(base_url=server.url) as http:
        for i, reward in enumerate(rewards):
            body = {"step": i, "metrics": {"reward/mean": reward}}
            http.post("/v1/runs/there-and-back/steps", json=body).raise_for_status()
    page = opened(f"{server.url}/#runs=there-and-back")
    said = page.locator(".answer.learning").inner_text()
    fell = r"fell from its best 0\.62\d at steps 4\d to (49|50) to 0\.41\d at steps 70 to 79"
    assert re.search(fell, said), said
    assert "0.393 at the last step; the mean is lower than at steps 30 to 39." in said
    steady = [{"step": i, "value": 0.5 + noise[i % 3]} for i in range(80)]
    assert page.evaluate("(points) => Unspiral.fallFromBest(points)", steady) is None
    assert page.evaluate("(points) => Unspiral.fallFromBest(points)", steady[:15]) is None
    chance = random.Random(0)
    runs = [[{"step": i, "value": chance.gauss(0.5, 0.1)} for i in range(200)] for _ in range(200)]
    called = page.evaluate("(runs) => runs.filter((points) => Unspiral.fallFromBest(points)).length", runs)
    assert called <= 2, "runs of noise alone"


def test_a_fall_of_fourteen_steps_is_the_headline_of_page_and_report_alike(server, browser, opened, tmp_path):
    rewards = [round(0.30 + 0.35 * min(1, i / 36), 4) for i in range(46)]
    rewards += [round(0.65 - 0.02 * i, 4) for i in range(1, 15)]
    rows = [{"step": i, "reward/mean": reward} for i, reward in enumerate(rewards)]
    with httpx.Client(base_url=server.url) as http:
        for row in rows:
            body = {"step": row["step"], "metrics": {"reward/mean": row["reward/mean"]}}
            http.post("/v1/runs/fell/steps", json=body).raise_for_status()
    on_page = opened(f"{server.url}/#runs=fell").locator(".answer.learning").inner_text()
    folder = tmp_path / "fell"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = browser.new_page()
    page.goto(write_report([folder], tmp_path / "report.html").as_uri())
    assert page.locator(".answer.learning").inner_text() == on_page
    page.close()
    assert "fell from its best 0.650 at steps 36 to 45 to 0.460 at steps 50 to 59" in on_page
    assert "0.370 at the last step" in on_page


def test_the_first_screen_says_what_is_known_and_that_a_run_has_ended_or_is_silent(server, opened):
    page = opened(f"{server.url}/#runs=low")
    learning = page.locator(".answer.learning")
    for words in ("reward", "than at steps", "No held-out score"):
        expect(learning).to_contain_text(words)
    expect(page.locator(".answer.sick")).to_contain_text("collapsed")
    doing = page.evaluate(SOON_AFTER)  # not by this machine's clock: after a minute the run would be silent
    assert "step 44 of 200 running" in doing and "left" in doing
    assert (
        page.evaluate("Unspiral.state(Unspiral.app.loaded[0], Unspiral.source.now() + 3600).word") == "silent"
    )
    assert [page.evaluate(STATUS_AFTER, seconds) for seconds in (1, 36_000)] == ["live", "no step for 10.0 h"]
    page = opened(f"{server.url}/#runs=high")
    expect(page.locator(".answer.doing")).to_contain_text("ended with an error")
    expect(page.locator(".answer.doing")).to_contain_text("exit status 3")
    expect(page.locator("#status")).to_have_text(re.compile(r"^ended with an error [\d.]+ (s|min) ago$"))
    expect(page.locator("#status")).to_have_class("status live over")


def test_the_address_holds_the_view(server, opened):
    page = opened(f"{server.url}/#runs=low,high")
    page.locator("#smooth").select_option("15")
    figure = page.locator("figure", has=page.locator("strong", has_text="Gradient norm"))
    figure.get_by_role("button", name="Logarithmic axis").click()
    page.locator("#minus").select_option("low")
    page.evaluate("Unspiral.app.zoom([10, 30])")
    page.wait_for_selector("#unzoom:not([hidden])")
    page.evaluate("Unspiral.pin(20)")
    page.locator(".others summary").click()
    page.get_by_label("Search the other metrics").fill("two")
    page.get_by_role("tab", name="About").click()
    state = (
        "JSON.stringify([...Object.values(Unspiral.app.view).map((v) => v instanceof Set ? [...v] : v), "
        "Unspiral.app.window, Unspiral.app.smooth])"
    )
    before = page.evaluate(state)
    address = page.evaluate("location.href")
    assert "from=10&to=30&smooth=15&pin=20&minus=low" in address and "tab=about" in address
    page.close()
    again = opened(address)
    # The first two are runs and range as the address had them when the page was opened.
    assert json.loads(again.evaluate(state))[2:] == json.loads(before)[2:]
    again.get_by_role("tab", name="Curves").click()
    assert again.locator(".others figure:visible").count() == 1


def test_the_smoothing_is_that_of_the_whole_run_whatever_part_is_drawn(server, opened):
    drawn = "[Unspiral.app.smooth, document.getElementById('smooth').value]"
    page = opened(f"{server.url}/#runs=low")
    assert page.evaluate(drawn) == [5, "5"]
    page.evaluate("Unspiral.app.zoom([10, 31])")
    page.wait_for_selector("#unzoom:not([hidden])")
    address = page.evaluate("location.href")
    assert "from=10&to=31" in address and "smooth" not in address
    assert page.evaluate(drawn) == [5, "5"]
    again = opened(address)
    assert again.evaluate(drawn) == [5, "5"]
    again.locator("#unzoom").click()
    again.wait_for_selector("#unzoom", state="hidden")
    assert again.evaluate(drawn) == [5, "5"]
    post(server, "short", 0, 12)
    assert opened(f"{server.url}/#runs=short").evaluate(drawn) == [1, "1"]


LATER = """([step, word]) => { const { app, source } = Unspiral;
  const [run] = app.loaded;
  run.updated = run.last_step_time + step - word;
  source.ahead = run.last_step_time + step - Date.now() / 1000;
  Unspiral.drawFirst(app.loaded);
  return document.querySelector(".answer.doing").innerText; }"""


def test_a_run_in_a_slow_step_is_silent_only_when_nothing_comes_from_it(server, opened):
    page = opened(f"{server.url}/#runs=low")
    alone = page.evaluate(LATER, [180, 180])
    assert "step 44 of 200 silent" in alone and "nothing else from it for 3 min" in alone
    assert "this step is slow, or the run was stopped, hangs, or cannot reach this service" in alone
    heard = page.evaluate(LATER, [180, 20])
    assert "step 44 of 200 running" in heard and "last word came 20 s ago" in heard
    # What is heard on the open page counts.
    page.evaluate("Unspiral.app.loaded[0].updated = 0")
    page.evaluate("Unspiral.app.heard('samples', {run: 'low', step: 44})")
    assert page.evaluate("Unspiral.app.loaded[0].updated >= Unspiral.source.now() - 60")
    post(server, "early", 0, 4)
    page = opened(f"{server.url}/#runs=early")
    assert "step 3 running" in page.evaluate(LATER, [180, 180]), "four steps do not tell what is usual"
    assert "step 3 silent" in page.evaluate(LATER, [700, 700])


def test_a_run_that_counts_from_0_has_no_step_left_after_its_last_one(server, opened):
    post(server, "whole", 0, 12)
    change(server, "POST", "whole/about", {"steps": 12})
    page = opened(f"{server.url}/#runs=whole")
    soon = page.evaluate(LATER, [1, 1])
    assert "step 11 of 12 running" in soon and "left" not in soon
    late = page.evaluate(LATER, [700, 700])
    assert "step 11 of 12 all steps posted" in late and "silent" not in late
    assert "Its last planned step ended 12 min ago; no word of its end came." in late


def test_one_run_minus_another_is_drawn_at_the_steps_of_both(server, opened):
    page = opened(f"{server.url}/#runs=low,high&minus=low&smooth=1")
    found = page.evaluate("Unspiral.app.selected.map((r) => [r.label, r.series.series['reward/mean'].mean])")
    assert len(found) == 1 and found[0][0] == "high − low"
    assert found[0][1] == pytest.approx([0.25] * STEPS, abs=1e-6)


def test_the_cursor_shows_all_curves_and_a_click_pins_the_step(server, opened):
    page = opened(f"{server.url}/#runs=low")
    plot = page.locator("figure:not([hidden]) .u-over").first
    plot.hover()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    expect(page.locator("figure:visible .unit").first).to_have_text(re.compile(r"^step \d"))
    places = page.locator("figure:visible .unit").all_inner_texts()
    assert len(set(places)) == 1 and places[0].startswith("step ") and len(places) >= 10
    step = int(places[0].removeprefix("step "))
    entropy = page.locator("figure", has=page.get_by_text("Entropy", exact=True)).locator("output b")
    metrics = change(server, "GET", f"low/steps?first={step}&limit=1")[0]["metrics"]
    assert float(entropy.first.inner_text()) == pytest.approx(metrics["entropy"], abs=2e-3)  # not smoothed
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 60)
    page.locator("#pinned strong", has_text=f"Step {step}").wait_for()
    assert f"pin={step}" in page.evaluate("location.hash")
    page.locator("#pinned summary").click()
    page.get_by_label("Search the values").fill("own/=")
    assert page.locator("#pinned tbody tr:visible").all_inner_texts() == ["own/=two\t−2"]
    page.get_by_role("button", name="Unpin").click()
    assert "pin=" not in page.evaluate("location.hash")


def test_a_curve_as_csv_and_over_the_whole_window(server, opened):
    page = opened(f"{server.url}/#runs=low&others=1&find=own")
    figure = page.locator("figure", has=page.locator("strong", has_text="own/=two"))
    with page.expect_download() as got:
        figure.get_by_role("button", name="Values as CSV").click()
    rows = list(csv.reader(Path(got.value.path()).read_text().splitlines()))
    assert rows[0] == ["step", "low own/=two"] and len(rows) == 1 + STEPS and rows[1] == ["0", "-2"]
    figure.get_by_role("button", name="Full screen").click()
    assert page.locator("figure.full").bounding_box()["height"] == 900
    page.keyboard.press("Escape")
    page.wait_for_selector("figure.full", state="detached")


def test_about_shows_what_differs_as_text(server, opened):
    page = opened(f"{server.url}/#runs=low,high&tab=about")
    assert HOSTILE in page.locator(".configuration").inner_text()
    page.get_by_label("only what differs").check()
    assert page.locator(".configuration tbody tr:visible th").all_inner_texts()[0].startswith("seed")
    assert page.locator(".configuration tbody tr:visible").count() == 1


def test_runs_are_renamed_hidden_and_deleted_with_the_token(tmp_path, opened, browser):
    settings = ServeSettings(store=str(tmp_path / "l.db"), port=0, token="s3cret")
    server = serve_in_thread(settings)
    bearer = {"Authorization": "Bearer s3cret"}
    for run in ("kept", "gone"):
        change(server, "POST", f"{run}/steps", {"step": 0, "metrics": {"reward/mean": 1.0}}, bearer)
    page = browser.new_page()
    page.set_default_timeout(60_000)
    page.goto(server.url)
    page.get_by_label("API token").fill("s3cret")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("button", name="Change gone").click()
    page.get_by_label("Title").fill(HOSTILE)
    page.get_by_label("hide it").check()
    page.get_by_role("button", name="Save").click()
    page.get_by_label("API token").fill("s3cret")
    page.get_by_role("button", name="Save").click()
    page.locator("#runs th", has_text=HOSTILE).wait_for()
    page.goto(f"{server.url}/?other#runs=kept")
    page.wait_for_selector(".status.live")
    assert page.locator("#runs tbody tr").count() == 1
    page.goto(f"{server.url}/?again#runs=gone")  # hidden, and still there by its link
    page.locator("#runs th", has_text=HOSTILE).wait_for()
    page.get_by_role("button", name="Change gone").click()
    page.get_by_text("Delete this run").click()
    remove = page.get_by_role("button", name="Delete for good")
    assert remove.is_disabled()
    page.get_by_label("Type gone").fill("gone")
    remove.click()
    page.get_by_label("API token").fill("s3cret")
    remove.click()
    page.locator("#runs th", has_text=HOSTILE).wait_for(state="detached")
    assert [r["run"] for r in httpx.get(f"{server.url}/v1/runs", headers=bearer).json()] == ["kept"]
    page.close()
    server.stop()


@pytest.mark.parametrize("view", ["", "&tab=about", "&pin=20&others=1"])
def test_a_phone_needs_no_sideways_scrolling(server, opened, view):
    page = opened(f"{server.url}/#runs=low,high{view}", width=390)
    page.locator(".answers").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
