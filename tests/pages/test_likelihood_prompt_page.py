"""The page of a prompt through time in a real Chromium, over both stores."""

from __future__ import annotations

import httpx
import pytest
from chromium import CHROMIUM, browser, opened  # noqa: F401
from redis_server import RedisServer
from test_likelihood_step_page import STEPS, fall_at, post

from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from tests.pages.microscope_world import collapsing_step

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
PATH = "/runs/falls/prompts"
FROZEN = "Who founded Brune?"


@pytest.fixture(scope="module", params=["sqlite", "redis"])
def server(request, tmp_path_factory):
    """A recorded run whose right answers fall, each step of which asks the same prompts."""
    folder = tmp_path_factory.mktemp("falls")
    run = folder / "falls"
    (run / "eval" / "after").mkdir(parents=True)
    (run / "eval" / "after" / "table.html").write_text("<h1>after</h1>")
    redis = RedisServer(folder) if request.param == "redis" else None
    store = redis.url if redis else str(run / "likelihood.db")
    server = serve_in_thread(ServeSettings(store=store, port=0))
    server.kind = request.param
    post(server.url)
    yield server
    server.stop()
    if redis:
        redis.stop()


def cells(page, row: str) -> list[str]:
    """What the cells of a token's row say, step by step."""
    return (
        page.locator(".along tr", has=page.get_by_label(row))
        .locator(".cell")
        .evaluate_all("all => all.map((c) => c.title)")
    )


def test_from_the_curves_to_a_frozen_answer_at_every_step(browser, server):
    page = opened(browser, f"{server.url}/#runs=falls")
    page.get_by_role("link", name="prompts through time").first.click()
    page.wait_for_selector(".along .cell")
    assert page.locator("#prompt").input_value() == FROZEN, "what a probe follows comes first"
    assert page.locator("#prompt option").first.inner_text() == f"{FROZEN} (probe, {STEPS} steps)"
    assert f"Kept at {STEPS} steps, 24 of them shown." in page.locator("#note").inner_text()
    said = cells(page, "token 1, action 1: <search>")
    assert len(said) == 24 and said[0].startswith("token 1 of action 1, step 0: log-prob −0.1")
    # The frozen answer lost 10 x the step's fall on its first token.
    last = float(said[-1].split("log-prob ")[1].split(",")[0].replace("−", "-"))
    assert last == pytest.approx(-0.1 - 10 * fall_at(STEPS - 1), abs=6e-3)
    token = page.locator(".token-row[aria-pressed=true]")
    assert page.locator(".one-token strong").inner_text() == f'"{token.inner_text()}"'
    assert page.locator(".line circle").count() == 24
    assert page.errors == [] and page.foreign == []
    page.close()


def test_two_steps_of_one_prompt_on_tokens_that_both_share(browser, server):
    page = opened(browser, f"{server.url}/runs/falls/steps/20#group=20-0")
    page.get_by_role("link", name="This prompt through time").click()
    page.wait_for_selector(".along .cell")
    assert page.locator(".group-head h2").inner_text() == "Who founded Arl?"
    assert page.locator("#note").inner_text() == f"Kept at {STEPS} steps, 24 of them shown."
    page.get_by_label("step 0, 0-0-0 as A").check()
    page.get_by_label(f"step {STEPS - 1}, {STEPS - 1}-0-1 as B").check()
    shared = page.locator(".common")
    assert shared.locator("h3").inner_text() == f"Shared by A (step 0) and B (step {STEPS - 1}): 6 tokens"
    assert shared.locator(".t").all_inner_texts() == [
        *("<search>", " who", " founded", " Arl", "</search>", "<answer>")
    ]
    sides = page.locator(".side h3").all_inner_texts()
    assert sides[0].endswith("0-0-0 step 0") and sides[1].endswith(f"{STEPS - 1}-0-1 step {STEPS - 1}")
    # Tokens of A's answer are known where a trajectory of the step begins as A does, and that is everywhere.
    assert not any("not known" in said for said in cells(page, "token 7, action 2:  Ines"))
    page.get_by_label("token 7, action 2:  Ines").click()
    address = page.url
    assert "a=0%2F0-0-0" in address and "token=6" in address
    shown = page.locator("#time").inner_html()
    page.reload()
    page.wait_for_selector(".line")
    assert page.locator("#time").inner_html() == shown and page.url == address, "the address holds the view"
    page.get_by_label("first step").fill("5")
    page.get_by_label("last step").fill("8")
    page.get_by_label("last step").press("Enter")
    page.locator("#note", has_text=f"at {STEPS} steps, 4 of them").wait_for()
    assert page.locator(".at-step").all_inner_texts() == ["5", "6", "7", "8"]
    assert page.errors == [] and page.foreign == []
    page.close()


def test_the_range_is_that_of_the_prompt_and_of_the_steps_that_come(browser, server):
    """In a run of its own: the page is open while it goes on."""
    run = f"grows-{server.kind}"

    def step(number: int) -> None:
        body = {"trajectories": collapsing_step(number, 0.1)}
        httpx.post(f"{server.url}/v1/runs/{run}/steps/{number}/samples", json=body).raise_for_status()

    for number in (2, 3, 4):
        step(number)
    page = opened(browser, f"{server.url}/runs/{run}/prompts?prompt=Who founded Arl?&first=3")
    page.locator(".line").wait_for()
    first, last = page.get_by_label("first step"), page.get_by_label("last step")
    assert (first.input_value(), last.get_attribute("placeholder")) == ("3", "4")
    last.focus()
    page.keyboard.type("1")
    step(10)
    page.locator("#news", has_text="Kept at 4 steps by now, up to step 10.").wait_for()
    assert last.get_attribute("placeholder") == "10"
    assert page.locator("#prompt option:checked").inner_text() == "Who founded Arl? (4 steps)"
    assert page.locator(".at-step").all_inner_texts() == ["3", "4"], "what is read stays"
    page.keyboard.type("0")
    assert last.input_value() == "10", "and what is typed"
    page.keyboard.press("Enter")
    page.locator(".at-step", has_text="10").wait_for()
    assert page.locator("#news").inner_text() == ""
    step(11)
    chosen = page.get_by_label("step 4, 4-0-0 as A")
    chosen.check()
    last.fill("")
    last.press("Enter")
    page.locator(".at-step", has_text="11").wait_for()
    step(12)
    page.get_by_label("step 4, 4-0-0 as A").check()
    page.get_by_role("button", name="Read again").click()
    page.locator(".at-step", has_text="12").wait_for()
    assert page.get_by_label("step 4, 4-0-0 as A").is_checked() and first.input_value() == "3"
    page.locator("#prompt").select_option(label="Who founded Brune? (6 steps)")
    page.locator(".at-step", has_text="2").first.wait_for()
    assert first.input_value() == "" and first.get_attribute("placeholder") == "2"
    assert page.errors == []
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_scrolls_sideways(browser, server, scheme):
    page = opened(browser, f"{server.url}{PATH}", 390, 844, color_scheme=scheme)
    page.wait_for_selector(".line")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    page.close()


def test_the_curves_lead_to_the_run_s_evaluations_where_it_has_some(browser, server):
    page = opened(browser, f"{server.url}/#runs=falls")
    page.wait_for_selector(".answer.learning .big")
    link = page.get_by_role("link", name="evaluations and their answers")
    if server.kind == "redis":  # a store that lies in no run's folder
        assert link.count() == 0
    else:
        link.click()
        page.get_by_role("link", name="← run falls").click()
        page.wait_for_selector(".answer.learning .big")
        link.click()
        page.get_by_role("link", name="after").click()
        assert page.locator("h1").inner_text() == "after"
    assert page.errors == []
    page.close()
