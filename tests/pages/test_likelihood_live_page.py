"""The live page in a real Chromium, against a running service."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from chromium import CHROMIUM, until
from places import DATA
from playwright.sync_api import expect

from services.likelihood.rest.launch import ServeSettings, serve_in_thread

LAB = DATA / "lab"
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]


def lab(name):
    return [json.loads(line) for line in (LAB / f"{name}.jsonl").read_text().splitlines()]


def post(server, run, metrics, headers=None):
    metrics = dict(metrics)
    body = {"step": metrics.pop("step"), "metrics": metrics}
    httpx.post(f"{server.url}/v1/runs/{run}/steps", json=body, headers=headers).raise_for_status()


@pytest.fixture
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def test_the_live_page_updates_shows_phases_and_alarms_and_overlays_runs(tmp_path, browser):
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0))
    fall, other = lab("grpo_2"), lab("llds5_2")
    for metrics in other[:40]:
        post(server, "held", metrics)
    for metrics in fall[:12]:
        post(server, "falls", metrics)
    errors, foreign = [], []
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.on("request", lambda r: None if r.url.startswith((server.url, "data:")) else foreign.append(r.url))
    page.goto(server.url)
    page.wait_for_selector("figure:not([hidden]) canvas")
    row = page.locator("#runs tr", has_text="falls")
    expect(row.get_by_role("checkbox")).to_be_checked()  # the run that was updated last
    expect(row).to_contain_text("healthy")
    expect(page.locator("#alarm-panel")).to_be_hidden()
    page.wait_for_selector(".status.live")

    for metrics in fall[12:40]:
        post(server, "falls", metrics)
    page.wait_for_selector("#runs tr:has-text('falls') .chip:has-text('collapsed')", timeout=60_000)
    page.wait_for_selector("#alarm-panel .alarm")
    row.get_by_text(str(fall[39]["step"]), exact=True).first.wait_for()  # the last post is drawn
    expect(page.locator("#alarms")).to_contain_text("nats a token")
    stands = page.locator("#lanes .lane.rule", has_text="likelihood").locator("button").last
    expect(stands).to_have_attribute("aria-label", re.compile("^alarm, steps"))
    page.evaluate("Unspiral.MARKED = 600000")  # until this test says otherwise
    stands.click()
    expect(page.locator("figure.pointed", has_text="Lag probe")).to_have_count(1)
    post(server, "falls", fall[40])
    row.get_by_text(str(fall[40]["step"]), exact=True).first.wait_for()
    page.wait_for_selector(f"#lanes button[aria-label*='to {fall[40]['step']}:']")
    expect(page.locator("figure.pointed")).to_have_count(1)  # a redraw leaves the mark where it was
    page.evaluate("Unspiral.MARKED = 1")
    stands.click()
    expect(page.locator("figure.pointed")).to_have_count(0)
    expect(page.locator("#alarms details[open]", has_text="likelihood").first).to_be_attached()
    expect(page.locator("#undecided-lanes")).to_contain_text("no rollout/length recorded: length")
    bar = page.locator("#timeline .bar").first
    expect(bar).to_have_attribute("aria-label", re.compile("decay.*collapsed"))
    lag = page.locator("figure", has_text="Lag probe").first
    expect(lag.locator(".plot")).to_have_attribute("aria-label", re.compile("^Lag probe"))

    page.get_by_role("checkbox", name="held").check()
    page.wait_for_selector("#timeline .lane:nth-child(2) .bar")
    expect(lag.locator(".legend button")).to_have_count(2)
    expect(page).to_have_url(re.compile("#runs=falls,held$"))

    lag.scroll_into_view_if_needed()  # the click on the lane has led to the alarm
    box = lag.locator(".plot").bounding_box()
    page.mouse.move(box["x"] + 120, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 220, box["y"] + 80, steps=4)
    page.mouse.up()
    page.wait_for_selector("#unzoom:not([hidden])")
    page.locator("#unzoom").click()
    page.wait_for_selector("#unzoom", state="hidden")
    assert errors == [] and foreign == []
    server.stop()


def test_a_long_run_is_drawn_from_thinned_curves_and_zooms_to_single_steps(tmp_path, browser):
    import numpy as np

    from services.likelihood.store import series
    from services.likelihood.store.sqlite.store import SQLiteStore

    n = 100_000
    store = SQLiteStore(tmp_path / "l.db")
    names = [
        "probe/lag",
        "probe/fixed",
        "reward/mean",
        "entropy",
        "grad_norm",
        "logp/right",
        "logp/wrong",
        "phase",
    ]
    with store._file.writing() as db:
        run_id, _ = store._enter(db, "long", 0, 0)
        for k, name in enumerate(names):
            values = np.full(-(-n // series.CHUNK) * series.CHUNK, np.nan)
            values[:n] = 0.0 if name == "phase" else np.sin(np.arange(n) / 9000 + k)
            chunks = values.reshape(-1, series.CHUNK)
            db.executemany(
                "INSERT INTO chunk (run, name, chunk, data) VALUES (?,?,?,?)",
                [(run_id, name, i, c.tobytes()) for i, c in enumerate(chunks)],
            )
        rows = [(run_id, i) for i in range(n)]
        db.executemany(
            "INSERT INTO step (run, step, attempt, time, posted, derived, trajectories) "
            "VALUES (?,?,0,0,'{}','{}',0)",
            rows,
        )
    store.close()
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0))
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    sizes = []
    page.on("response", lambda r: sizes.append(len(r.body())) if "/series" in r.url else None)
    page.goto(server.url)
    page.wait_for_selector("figure:not([hidden]) canvas")
    assert page.evaluate("Unspiral.app.selected[0].series.step.length") <= 1200
    assert page.evaluate("Unspiral.app.selected[0].last_step") == n - 1
    page.evaluate("Unspiral.app.zoom([50000, 50400])")
    until(page, "Unspiral.app.selected[0].series.stride === 1")
    assert page.evaluate("Unspiral.app.selected[0].series.step[0]") == 50000
    assert max(sizes) < 1_000_000
    server.stop()


def test_with_a_token_the_page_asks_for_it_and_then_works(tmp_path, browser):
    settings = ServeSettings(store=str(tmp_path / "l.db"), port=0, token="s3cret")
    server = serve_in_thread(settings)
    headers = {"Authorization": "Bearer s3cret"}
    for metrics in lab("grpo_2")[:12]:
        post(server, "run", metrics, headers)
    page = browser.new_page()
    page.goto(server.url)
    page.get_by_label("API token").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("not the token")
    page.get_by_label("API token").fill("s3cret")
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_selector("figure:not([hidden]) canvas")
    page.wait_for_selector(".status.live")
    post(server, "run", lab("grpo_2")[12], headers)
    until(page, "Unspiral.app.selected[0].last_step === 12")
    server.stop()
