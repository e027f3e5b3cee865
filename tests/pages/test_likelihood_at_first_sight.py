"""What a page says at first sight, in a real Chromium: no sign without a meaning, no more digits than are
read, no column of dashes, no help in the way, and lists that say what a name stands for."""

from __future__ import annotations

import json

import httpx
import pytest
from chromium import CHROMIUM, browser, opened, until  # noqa: F401
from microscope_world import trajectory
from playwright.sync_api import expect
from suite_rows import evaluation
from test_likelihood_step_page import post, recorded

from services.likelihood.evaluations import evaluation_event
from services.likelihood.exports.report import write_report
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from trainer.suite.sets import SETS

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
PHONE = (390, 844)
LONG = "In which year was the guild of weavers of the northern town of Arl founded, and by whom"
BRIEF = {"reward/mean": 0.25, "logp/right": -1.2345, "probe/lag": -0.0125, "displacement/share_negative": 0.5}
IN_VIEW = "e => { const { top } = e.getBoundingClientRect(); return top >= 0 && top < innerHeight; }"
ROOM_LEFT = """e => { const pen = document.createElement("canvas").getContext("2d");
  const style = getComputedStyle(e);
  pen.font = style.font; const inside = e.clientWidth - parseFloat(style.paddingLeft) * 2;
  return inside - pen.measureText(e.placeholder).width; }"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a recorded run, with an evaluation."""
    folder = tmp_path_factory.mktemp("runs") / "falls"
    right = {one: [i < 4 for i in range(10)] for one in SETS}
    evaluation(folder / "eval" / "search7-rag", right, method="rag", model="<b>m</b>")
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(m) for m in recorded()))
    (folder / "config.yaml").write_text("run: {name: falls}\n")
    return folder


@pytest.fixture(scope="module")
def url(folder):
    server = serve_in_thread(ServeSettings(store=str(folder / "likelihood.db"), port=0))
    post(server.url)
    yield server.url
    server.stop()


def posted(url, run, step, **metrics):
    body = {"step": step, "metrics": metrics}
    httpx.post(f"{url}/v1/runs/{run}/steps", json=body).raise_for_status()


def closed(page):
    assert page.errors == [] and page.foreign == []
    page.close()


def test_a_line_without_a_direction_begins_with_its_number(browser, url):
    for step in range(3):
        posted(url, "short", step, **{"reward/mean": 0.501, "rollout/tokens_per_s": 2172.04})
    page = opened(browser, f"{url}/#runs=short&pin=1")
    expect(page.locator("#pinned tr[data-name='rollout/tokens_per_s'] td")).to_have_text("2172.04")
    big = page.locator(".answer.learning .big")
    few = (
        "0.501 reward, mean of the last 3 points: 0.501 at step 0, 0.501 at step 2; "
        "so few steps show no direction by themselves"
    )
    expect(big).to_have_text(few)
    expect(page.locator(".answer.doing")).to_contain_text("2172 tokens/s")
    for step in range(3, 24):
        posted(url, "short", step, **{"reward/mean": 0.501})
    page.reload()
    expect(big).to_have_text("0.501 reward, mean of the last 10 points: no clear change from steps 0 to 9")
    closed(page)


def test_numbers_have_three_digits_and_whole_ones_all_of_theirs(browser, url):
    page = opened(browser, f"{url}/#runs=falls")
    given = [2172.04, 999.7, 142.6, 21.72, 2.1724, -0.21724, 0.0217, 0.0012345, 0.0001, 12345, 0, None]
    shown = page.evaluate("(all) => all.map(Unspiral.number)", given)
    expected = ["2172", "1000", "143", "21.7", "2.17", "−0.217", "0.0217", "0.00123", "1.0e−4", "12345", "0"]
    assert shown == [*expected, "–"]
    closed(page)


def test_few_rewards_are_said_by_their_ends_and_no_mean_twice(browser, url):
    page = None
    few = "0.575 reward, mean of the last 10 points: 0.250 at step 0, 0.800 at step 11; "
    rising = [0.82 + step / 50 for step in range(9)]
    for first, rewards, line, said in (
        (0, [0.25], 0, "0.250 reward, mean of 1 point: one step shows no direction"),
        (1, [0.3 + step / 20 for step in range(11)], 0, f"{few}so few steps show no direction by themselves"),
        (12, rising, 1, "0.980 at the last step; no earlier mean was higher."),
        (21, [0.88] * 8, 1, "0.880 at the last step, best mean 0.910."),
    ):
        for step, reward in enumerate(rewards, first):
            posted(url, "few", step, **{"reward/mean": reward})
        page = page or opened(browser, f"{url}/#runs=few")
        expect(page.locator(".answer.learning p").nth(line)).to_have_text(said)
        expect(page.locator(".answer.learning p")).to_have_count(line + 2)
    expect(page.locator(".answer.learning p").last).to_have_text("No held-out score was posted.")
    closed(page)


def test_the_table_has_the_values_of_runs_that_are_not_drawn_and_follows_them(browser, url):
    scored = BRIEF | {"eval/em_greedy": 0.75}
    posted(url, "aside", 0, **scored)
    posted(url, "aside", 1, **BRIEF)
    page = opened(browser, f"{url}/#runs=falls")
    row = page.locator("#runs tbody tr", has_text="aside")
    expect(row.locator("td.n")).to_have_text(["1", "0.250", "0.750", "−1.23", "−0.0125", "0.500", "none"])
    expect(row.locator("td").first).to_have_text("unknown since 0")
    assert not row.locator("input").is_checked()
    posted(url, "aside", 2, **BRIEF | {"reward/mean": 0.5})
    expect(row.locator("td.n").nth(0)).to_have_text("2")
    expect(row.locator("td.n").nth(1)).to_have_text("0.500")
    expect(row.locator("td.n").nth(2)).to_have_text("0.750")
    closed(page)


def test_that_reward_and_held_out_score_part_is_said_before_either(browser, url):
    for step in range(1, 31):
        posted(url, "parts", step, **{"reward/mean": 0.9 - step / 50})
    for step, score in ((0, 0.1), (30, 0.8)):
        event = evaluation_event(
            step, 0, f"s{step}", "greedy", {"em": score, "f1": score, "n": 200}, {"eval/em_greedy": score}
        )
        httpx.post(f"{url}/v1/runs/parts/events", json=event.model_dump()).raise_for_status()
    page = opened(browser, f"{url}/#runs=parts")
    lines = page.locator(".answer.learning p")
    expect(lines.first).to_contain_text("Held-out score and reward went opposite ways: the score +0.700")
    expect(lines.nth(1)).to_contain_text("reward, mean of the last 10 points: fell from its best")
    expect(page.locator(".answer.learning .opposite")).to_have_count(1)
    closed(page)


def test_the_hint_about_curves_comes_with_the_first_curve(browser, url):
    httpx.post(f"{url}/v1/runs/early/about", json={"steps": 9}).raise_for_status()
    page = opened(browser, f"{url}/#runs=early")
    expect(page.locator(".answer.doing")).to_contain_text("no step of 9 has ended yet")
    hint = page.get_by_text("How to read the curves")
    expect(hint).to_be_hidden()
    posted(url, "early", 1, **{"reward/mean": 0.5})
    expect(hint).to_be_visible()
    closed(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_a_step_begins_with_its_groups_and_tokens(browser, url, scheme):
    page = opened(browser, f"{url}/runs/falls/steps/20", *PHONE, color_scheme=scheme)
    page.locator(".side .t").first.wait_for()
    help_text = page.get_by_text("A square is a trajectory")
    expect(help_text).to_be_hidden()
    assert page.locator(".group-head h2").evaluate(IN_VIEW), "the chosen group stands in the first window"
    text = page.get_by_label("Text")
    assert text.evaluate(ROOM_LEFT) > 0, "its placeholder is read whole"
    page.locator(".card").last.click()
    expect(page.locator(".card").last).to_have_attribute("aria-pressed", "true")
    until(page, "document.querySelector('.groups').scrollLeft > 0")
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    page.get_by_text("How to read this").click()
    expect(help_text).to_be_visible()
    closed(page)
    wide = opened(browser, f"{url}/runs/falls/steps/20", color_scheme=scheme)
    expect(wide.get_by_text("A square is a trajectory")).to_be_visible()
    closed(wide)


def test_on_a_phone_the_name_of_a_prompt_is_read_whole(browser, url):
    kept = {"trajectories": [trajectory("a", question=LONG)]}
    httpx.post(f"{url}/v1/runs/asks/steps/1/samples", json=kept).raise_for_status()
    page = opened(browser, f"{url}/runs/asks/prompts", *PHONE)
    chosen = page.locator("#prompt")
    expect(chosen.locator("option")).to_have_text(f"{LONG} (1 step)")
    line = page.locator("input[name=first]").bounding_box()["height"]
    assert chosen.bounding_box()["height"] > 1.5 * line, "it has as many lines as it needs"
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    closed(page)


def test_in_a_report_the_ways_to_tokens_are_links_as_on_the_live_page(browser, url, folder, tmp_path):
    report = write_report([folder], tmp_path / "report.html")
    for address in (report.as_uri(), f"{url}/#runs=falls"):
        page = opened(browser, address, *PHONE)
        page.foreign.clear()  # the file itself
        row = page.locator("#runs tbody tr", has_text="falls")
        expect(row.locator("td.n").first.get_by_role("link", name="29", exact=True)).to_be_visible()
        expect(page.get_by_role("button", name="See the tokens")).to_have_count(0)
        way = page.locator(".answer.sick").get_by_role("link", name="See the tokens")
        expect(way).to_be_visible()
        if address.startswith("file"):
            before = page.url
            way.click()
            expect(page.locator("#samples .strip .t.at")).to_have_count(1)
            assert page.url == before, "the view in the address stays"
        closed(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_list_of_evaluations_says_of_what_each_is(browser, url, scheme):
    page = opened(browser, f"{url}/runs/falls/evaluations", *PHONE, color_scheme=scheme)
    heads = page.locator(".listed thead th").all_inner_texts()
    assert heads == ["Evaluation", "Method", "Exact match", "Questions", "Made, UTC"]
    cells = [" ".join(text.split()) for text in page.locator(".listed tbody tr > *").all_inner_texts()]
    assert cells[:2] == ["search7-rag <b>m</b>", "rag"]
    low, high = (float(x) for x in cells[2].split()[1].split("–"))
    assert cells[2].startswith("0.400 ") and low < 0.4 < high and cells[3] == "70"
    assert page.locator(".listed time").get_attribute("datetime").endswith("Z")
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    expect(page.locator("html")).to_have_attribute("data-theme", scheme)
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_text("Theme: light")
    page.get_by_role("link", name="search7-rag").click()
    page.wait_for_url("**/runs/falls/evaluations/search7-rag")
    page.get_by_role("link", name="evaluations of falls").click()
    page.get_by_role("link", name="← run falls").click()
    page.wait_for_url("**/#runs=falls**")
    closed(page)


def test_an_evaluation_whose_table_cannot_be_read_is_in_the_list(browser, url, folder):
    bad = folder / "eval" / "torn"
    bad.mkdir()
    (bad / "table.html").write_text("<p>x</p>")
    for text in (None, "{", '{"measured": []}', '{"measured": [{"em": 1}]}', '{"measured": [{"em": {}}]}'):
        if text is not None:
            (bad / "table.json").write_text(text)
        page = opened(browser, f"{url}/runs/falls/evaluations")
        row = page.locator(".listed tbody tr", has_text="torn").locator("td")
        assert row.all_inner_texts()[:3] == ["–", "–", "–"]
        closed(page)


def test_the_login_says_where_the_token_is_found(browser, tmp_path):
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0, token="let me in"))
    page = opened(browser, server.url, *PHONE)
    said = page.locator(".where").inner_text()
    for part in ("UNSPIRAL_API_TOKEN", "export UNSPIRAL_API_TOKEN=…", "deploy/new_env.sh", ".env"):
        assert part in said
    assert "let me in" not in page.content()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    page.get_by_label("API token").fill("let me in")
    page.get_by_role("button", name="Sign in").click()
    page.locator("#runs").wait_for()
    closed(page)
    server.stop()
