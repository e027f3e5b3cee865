"""The microscope's page in a real Chromium: from an alarm to the token that fell; text that stays text."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from chromium import CHROMIUM, browser, opened  # noqa: F401
from places import DATA
from playwright.sync_api import expect
from redis_server import RedisServer

from services.likelihood.exports.report import write_report
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from services.likelihood.store.opening import open_store
from tests.pages.microscope_world import collapsing_step, frozen_at, trajectory

LAB = DATA / "lab"
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
STEPS = 30


def recorded() -> list[dict]:
    """A run that collapsed in the laboratory."""
    lines = (LAB / "grpo_2.jsonl").read_text().splitlines()[:STEPS]
    return [json.loads(line) for line in lines]


def fall_at(step: int) -> float:
    """Nats per token that right answers lose at a step: a hundredth of what the fixed probe lost by it."""
    return -min(0.0, recorded()[step].get("probe/fixed") or 0.0) / 100


def post(url: str) -> None:
    """The recorded run, with trajectories that fell as far as its own curve says."""
    with httpx.Client(base_url=url) as http:
        for metrics in recorded():
            step = metrics.pop("step")
            http.post("/v1/runs/falls/steps", json={"step": step, "metrics": metrics}).raise_for_status()
            made = collapsing_step(step, fall_at(step))
            posted = http.post(f"/v1/runs/falls/steps/{step}/samples", json={"trajectories": made})
            posted.raise_for_status()
            again = [frozen_at(step, 10 * fall_at(step))] if step else []
            posted = http.post(f"/v1/runs/falls/steps/{step}/samples", json={"trajectories": again})
            posted.raise_for_status()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("falls")


@pytest.fixture(scope="module")
def server(folder):
    server = serve_in_thread(ServeSettings(store=str(folder / "likelihood.db"), port=0))
    post(server.url)
    yield server
    server.stop()


def change_of(page) -> float:
    said = page.locator(".readout span", has_text="change").inner_text()
    return float(said.split()[1].replace("−", "-"))


def test_from_the_first_alarm_to_the_token_that_lost_most_in_two_clicks(browser, server):
    page = opened(browser, f"{server.url}/#runs=falls")
    alarms = httpx.get(f"{server.url}/v1/runs/falls/alarms").json()
    first = min(alarms, key=lambda a: a["step"])
    page.locator("#alarms summary", has_text=first["rule"]).first.click()
    page.get_by_role("link", name=f"See the tokens of step {first['step']}").click()
    page.wait_for_selector(".strip .t.at")
    assert f"/runs/falls/steps/{first['step']}?rule={first['rule']}" in page.url
    made = collapsing_step(first["step"], fall_at(first["step"]))
    held = [t for t in made if t["advantage"] >= 0]

    def falls(t):
        return [a - b for s in t["segments"] if s["by"] == "model"
                for a, b in zip(s["logp_after"], s["logp_before"], strict=True)]  # fmt: skip

    worst = min(held, key=lambda t: sum(falls(t)) / len(falls(t)))
    assert page.locator("[name=side-a]:checked").get_attribute("aria-label") == f"{worst['uid']} as A"
    assert change_of(page) == pytest.approx(min(falls(worst)), abs=6e-3)
    assert page.locator(".strip .t.at").evaluate("e => { const r = e.getBoundingClientRect(); "
        "return r.top > 0 && r.bottom < innerHeight; }")  # fmt: skip
    assert page.errors == [] and page.foreign == []
    page.close()


def test_a_group_stands_side_by_side_on_its_shared_beginning(browser, server):
    page = opened(browser, f"{server.url}/runs/falls/steps/20#group=20-1")
    page.wait_for_selector(".common .t")
    assert page.locator(".common h3").inner_text() == "Shared by A (right) and B (wrong): 6 tokens"
    assert page.locator(".common .t").all_inner_texts() == [
        *("<search>", " who", " founded", " Arl", "</search>", "<answer>")
    ]
    sides = page.locator(".side h3").all_inner_texts()
    assert sides[0].startswith("A ✓ right") and sides[1].startswith("B ✗ wrong")
    assert page.locator(".side").first.locator(".t.held").count() > 0
    assert page.locator(".side").last.locator(".t.held").count() == 0, "LLDS leaves wrong answers"
    assert not page.locator(".document .body").first.is_visible()
    page.locator(".document summary").first.click()
    assert "Arl was founded by Ines Tobar in 1412." in page.locator(".document .body").first.inner_text()
    assert "= equal" in page.locator(".reward").first.inner_text()
    assert "≠ differs" in page.locator(".reward").last.inner_text()
    assert "nats" in page.locator(".legend-row").inner_text()

    page.get_by_label("20-1-2 as B").check()
    page.locator(".side h3", has_text="20-1-2").wait_for()
    page.keyboard.press("Escape")
    page.locator(".group-panel").focus()
    page.keyboard.press("m")
    lowest = change_of(page)
    page.keyboard.press("ArrowLeft")
    assert change_of(page) > lowest
    page.keyboard.press("j")
    page.locator(".card[aria-pressed=true]", has_text="Who founded Arl?").wait_for()
    page.get_by_label("Show").select_option("wrong")
    page.locator("p.hint", has_text="of 12 trajectories").wait_for()
    page.get_by_label("Text").fill("no such text")
    page.locator("p.hint", has_text="0 of 12").wait_for()
    assert page.locator(".card").count() == 0 and page.errors == []
    page.get_by_role("link", name="next kept step").click()
    page.wait_for_url("**/steps/21**")
    page.close()


@pytest.mark.parametrize(("panel", "begins"), [("a", ""), ("b", "b")])
def test_a_token_that_was_pressed_stands_in_the_address_and_is_found_by_it(browser, server, panel, begins):
    page = opened(browser, f"{server.url}/runs/falls/steps/2")
    page.wait_for_selector(".strip .t[data-at]")
    uid = page.evaluate(
        """(panel) => [...new Set([...document.querySelectorAll(".t[data-at]")]
            .map((t) => t.closest("[data-uid]").dataset.uid))]["ab".indexOf(panel)]""",
        panel,
    )
    token = page.locator(f"[data-uid='{uid}'] .t[data-at]").last
    at = token.get_attribute("data-at")
    token.click()
    there = re.compile(rf"&at={begins}{re.escape(at)}$")
    expect(page).to_have_url(there)
    page.reload()
    page.wait_for_selector(".strip .t.at")
    marked = page.locator(".t.at")
    assert marked.get_attribute("data-at") == at
    assert marked.evaluate("(t) => t.closest('[data-uid]').dataset.uid") == uid
    page.keyboard.press("ArrowLeft")
    expect(page).not_to_have_url(there)
    page.keyboard.press("Escape")
    expect(page).not_to_have_url(re.compile("at="))
    assert page.errors == []
    page.close()


def test_the_way_to_the_next_step_comes_when_it_is_kept(browser, server):
    def step(number: int) -> None:
        body = {"trajectories": collapsing_step(number, 0.1)}
        httpx.post(f"{server.url}/v1/runs/grows/steps/{number}/samples", json=body).raise_for_status()

    step(1)
    page = opened(browser, f"{server.url}/runs/grows/steps/2")
    page.get_by_text("No trajectories of step 2 are kept").wait_for()
    step(2)
    page.wait_for_selector(".side .t")
    assert page.get_by_role("link", name="next kept step").count() == 0
    shown = page.locator("#group-panel").inner_html()
    page.get_by_role("link", name="previous kept step").focus()
    step(5)
    page.get_by_role("link", name="next kept step").wait_for()
    assert page.locator("#group-panel").inner_html() == shown
    assert page.evaluate("document.activeElement.ariaLabel") == "previous kept step"
    page.get_by_role("link", name="next kept step").click()
    page.wait_for_url("**/steps/5**")
    assert page.errors == []
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_scrolls_sideways(browser, server, scheme):
    page = opened(browser, f"{server.url}/runs/falls/steps/20", 390, 844, color_scheme=scheme)
    page.wait_for_selector(".side .t")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    left = [page.locator(".side").nth(i).bounding_box()["x"] for i in (0, 1)]
    assert left[0] == left[1], "one below the other"
    page.close()


def test_text_from_outside_is_shown_as_text(browser, server):
    html = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'><b>bold</b>"
    line = "x" * 1_000_000
    one = trajectory("bad<i>", group="hostile", question=f"{html}\u202eabc\u202c ?", answer="Ines")
    one["segments"][0]["documents"] = [{"id": html, "title": html, "text": f"{html}{line}"}]
    one["segments"][1]["text"] = f"{html}\u202e{line}"
    one["segments"][2]["tokens"] = [html, f"\u202e{line}", "</answer>"]
    one["scoring"]["answer"] = f"{html}{line}"
    with httpx.Client(base_url=server.url) as http:
        posted = http.post("/v1/runs/hostile/steps/1/samples", json={"trajectories": [one]})
        posted.raise_for_status()
    page = opened(browser, f"{server.url}/runs/hostile/steps/1", 390, 844)
    page.wait_for_selector(".side .t")
    assert html in page.locator(".strip .t").nth(5).inner_text()
    assert "U+202E" in page.locator(".group-head h2").inner_text()
    for summary in page.locator(".folded summary").all():
        summary.click()
    page.locator(".document .more").click()
    page.locator(".strip .more").click()
    assert page.locator(".document .body").inner_text().count("x") >= 1_000_000
    assert len(page.locator(".strip .t").nth(6).inner_text()) >= 1_000_000
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("window.broken") is None
    assert page.locator("#microscope script, #microscope img, #microscope b:text('bold')").count() == 0
    assert page.errors == [] and page.foreign == []
    page.close()


def test_both_stores_give_the_same_page(browser, server, tmp_path):
    (tmp_path / "redis").mkdir()
    redis = RedisServer(tmp_path / "redis")
    other = serve_in_thread(ServeSettings(store=redis.url, port=0))
    post(other.url)
    shown = []
    for url in (server.url, other.url):
        page = opened(browser, f"{url}/runs/falls/steps/20?rule=likelihood")
        page.wait_for_selector(".strip .t.at")
        shown.append(page.locator("#microscope").inner_html())
        page.close()
    other.stop()
    redis.stop()
    assert shown[0] == shown[1] and "20-1" in shown[0]


def test_a_report_carries_the_worst_and_the_best_groups(browser, server, folder, tmp_path):
    run = tmp_path / "falls"
    run.mkdir()
    (run / "metrics.jsonl").write_text("\n".join(json.dumps(m) for m in recorded()))
    (run / "config.yaml").write_text("run: {name: falls}\n")
    source = open_store(str(folder / "likelihood.db"))
    copy = open_store(str(run / "likelihood.db"))
    for step in source.sampled_steps("falls"):
        copy.put_samples("falls", step, 0, source.samples("falls", step))
    source.close()
    copy.close()
    report = write_report([run], tmp_path / "report.html")
    page = opened(browser, report.as_uri())
    page.foreign.clear()
    page.wait_for_selector("#samples .strip .t")
    options = page.locator("#sample-choice option").all_inner_texts()
    assert options[0] == "step 0 (first)" and options[-1] == f"step {STEPS - 1} (last)"
    assert any("alarm likelihood" in option for option in options)
    assert page.locator("#samples .card").count() == 2
    alarm = page.locator("#alarms details", has=page.get_by_text("likelihood", exact=True))
    if alarm.get_attribute("open") is None:
        alarm.locator("summary").click()
    alarm.locator(".tokens-link").click()
    page.wait_for_selector("#samples .strip .t.at")
    assert "Alarm likelihood" in page.locator("#samples .why").inner_text()
    page.locator("#samples").get_by_label("Text").fill("weavers")
    page.locator("#samples p.hint", has_text="2 of 8 trajectories").wait_for()
    assert page.errors == [] and page.foreign == []
    page.close()


def test_an_answer_that_was_never_closed_is_not_called_none(browser, server):
    """And without a scoring by the trainer, the answer that was written is shown."""
    unscored = {"function": "em", "answer": None, "golden": []}
    made = [
        trajectory(uid, group="tags", right=False, answer=answer)
        for uid, answer in [
            ("open", "Ines"),
            ("unposted", "Oda Merl"),
            ("unread", "Corva"),
            ("silent", "Arl"),
        ]
    ]
    for t, scoring in zip(made, (unscored, None, unscored, unscored), strict=True):
        t["scoring"] = scoring
    for t in (made[0], made[3]):  # the last token is the closing tag
        segment = t["segments"][2]
        for key in ("tokens", "logp_before", "logp_after"):
            segment[key] = segment[key][:-1]
    made[3]["segments"][2]["tokens"][0] = "so"
    with httpx.Client(base_url=server.url) as http:
        http.post("/v1/runs/tags/steps", json={"step": 0, "metrics": {"reward/mean": 0.0}}).raise_for_status()
        http.post("/v1/runs/tags/steps/0/samples", json={"trajectories": made}).raise_for_status()
    page = opened(browser, f"{server.url}/runs/tags/steps/0?group=tags")
    page.locator("tr[data-uid=open]").wait_for()
    said = {
        uid: page.locator(f"tr[data-uid={uid}] td.answer").inner_text()
        for uid in ("open", "unposted", "unread", "silent")
    }
    assert said == {
        "open": "not closed",
        "unposted": "Oda Merl",
        "unread": "none that the reward reads",
        "silent": "none",
    }
    heads = page.locator("table.trajectories thead").inner_text()
    assert (
        "Tokens that fell" in heads and "trajectories that fell" in page.locator(".card").first.inner_text()
    )
    assert page.errors == []
    page.close()
