"""What is pressed while the page draws itself anew is not lost: the drawing waits for the press to end."""

from __future__ import annotations

import pytest
from chromium import CHROMIUM, browser, opened, until  # noqa: F401
from playwright.sync_api import expect
from test_likelihood_focus import Going, run  # noqa: F401

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
# How often it was asked whether a press is over: all that the page draws by itself asks first.
ASKED = """() => { const { press } = Unspiral; const over = press.over; window.asked = 0; press.most = 600000;
  press.over = function () { window.asked += 1; return over.call(this); }; }"""
WAITS = "before => window.asked > before"


def live(run: Going, browser, address: str = "#runs=falls"):
    """The page of a run, which notes each drawing that is due; a machine under load ends no press."""
    page = opened(browser, f"{run.url}/{address}")
    page.locator("figure:not([hidden]) .legend button").first.wait_for()
    page.locator(".status.live").wait_for()
    until(page, "Unspiral.app.rereading === null")  # all was read anew when the stream opened
    page.evaluate(ASKED)
    return page


def press(page, place, during) -> None:
    """Press a place with the mouse, and let it go after something that makes the page draw. What an earlier
    press held up is drawn first: it may move the place away from under the mouse."""
    until(page, "!Unspiral.app?.due && !Unspiral.app?.rereading")  # only the live page draws by itself
    place.hover()
    before = page.evaluate("window.asked")
    page.mouse.down()
    during()
    until(page, WAITS, before)
    page.mouse.up()


def test_a_press_counts_wherever_a_step_comes_within_it(run, browser):
    page = live(run, browser, "#runs=falls&pin=5")
    page.locator("#pinned .pin-head").wait_for()
    alarm = page.locator("#alarms > details").last
    name = alarm.get_attribute("id")
    was_open = alarm.get_attribute("open") is not None
    press(page, alarm.locator("summary").first, run.step)
    expect(page.locator(f"details[id='{name}'][open]")).to_have_count(0 if was_open else 1)

    line = page.locator("figure:not([hidden]) .legend button").first
    press(page, line, run.step)
    expect(line).to_have_attribute("aria-pressed", "false")

    stands = page.locator("#lanes > .lane button").last
    press(page, stands, run.step)
    page.locator("figure.pointed").wait_for()

    press(page, page.get_by_role("button", name="Unpin"), run.step)
    expect(page.locator("#pinned")).to_be_hidden()

    press(page, page.get_by_role("tab", name="About"), run.step)
    expect(page.get_by_role("tab", name="About")).to_have_attribute("aria-selected", "true")
    press(page, page.get_by_role("button", name="Reason and advice"), run.step)
    expect(page.get_by_role("tab", name="Curves")).to_have_attribute("aria-selected", "true")

    step = page.locator("#runs td.n a")
    expect(step).to_have_text(str(run.at - 1))  # what came within the presses is drawn
    press(page, step, run.step)
    page.wait_for_url("**/runs/falls/steps/*")
    assert page.errors == []
    page.close()


def test_the_space_bar_counts_as_well(run, browser):
    page = live(run, browser)
    page.get_by_role("tab", name="About").click()
    page.get_by_role("button", name="Reason and advice").focus()
    page.keyboard.down("Space")
    before = page.evaluate("window.asked")
    run.step()
    until(page, WAITS, before)
    page.keyboard.up("Space")
    expect(page.get_by_role("tab", name="Curves")).to_have_attribute("aria-selected", "true")
    page.close()


def test_a_press_without_an_end_does_not_hold_the_page_up(run, browser):
    page = live(run, browser)
    page.locator("h1").hover()
    page.mouse.down()
    page.evaluate("Unspiral.press.most = 1")
    last = page.locator("#runs td.n a")
    expect(last).to_have_text(str(run.step()))
    page.mouse.up()
    page.evaluate("Unspiral.press.most = 600000")
    page.mouse.down()
    before = page.evaluate("window.asked")
    number = run.step()
    until(page, WAITS, before)
    page.evaluate("window.dispatchEvent(new Event('blur'))")  # the release is never told
    expect(last).to_have_text(str(number))
    page.mouse.up()
    page.close()


def test_a_press_whose_end_was_never_told_holds_no_later_one_up(run, browser):
    page = live(run, browser)
    lost = "new PointerEvent('pointerdown', {pointerId: 77, bubbles: true})"
    page.evaluate(f"document.body.dispatchEvent({lost})")
    page.evaluate("""() => { const now = performance.now.bind(performance);
      performance.now = () => now() + 2 * Unspiral.press.most; }""")
    page.locator("h1").hover()
    page.mouse.down()
    page.evaluate("() => { window.over = false; Unspiral.press.over().then(() => { window.over = true; }); }")
    assert not page.evaluate("window.over")
    page.mouse.up()
    until(page, "window.over")
    page.close()


def test_a_run_that_is_chosen_while_all_are_read_anew_stays_chosen(run, browser):
    run.http.post("/v1/runs/beside/steps", json={"step": 1, "metrics": {"a": 1.0}}).raise_for_status()
    page = live(run, browser)
    box = page.get_by_role("checkbox", name="beside")
    press(page, box, lambda: page.evaluate("Unspiral.app.again(0)"))
    expect(box).to_be_checked()
    until(page, "location.hash === '#runs=falls,beside'")
    page.evaluate("Unspiral.app.again(0)")
    until(page, "Unspiral.app.rereading === null")
    expect(box).to_be_checked()
    run.http.delete("/v1/runs/beside").raise_for_status()
    page.close()


def test_a_token_is_chosen_though_a_changed_range_is_read_within_the_press(run, browser):
    page = opened(browser, f"{run.url}/runs/falls/prompts?prompt=Who founded Arl?")
    page.locator(".line").wait_for()
    page.evaluate(ASKED)
    page.get_by_label("last step").fill("9")
    # The press itself takes the focus from the field, which then asks for the steps up to 9.
    press(page, page.locator(".token-row").nth(2), lambda: None)
    expect(page.locator(".at-step").last).to_have_text("9")
    expect(page.locator(".token-row").nth(2)).to_have_attribute("aria-pressed", "true")
    assert page.errors == []
    page.close()
