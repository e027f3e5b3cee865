"""A step that is posted draws the live page anew. Whoever works with the keyboard keeps the place."""

from __future__ import annotations

import httpx
import pytest
from chromium import CHROMIUM, browser, opened  # noqa: F401
from playwright.sync_api import expect
from test_likelihood_step_page import fall_at, recorded

from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from tests.pages.microscope_world import collapsing_step

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
FIRST = 20
BOX = "(document.querySelector('#runs .wide'))"


class Going:
    """A run that goes on: each call of `step` posts the next step with its trajectories."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=30)
        self.at = 0
        self.posted = recorded()

    def step(self) -> int:
        metrics = dict(self.posted[self.at])
        number = metrics.pop("step")
        body = {"step": number, "metrics": metrics}
        self.http.post("/v1/runs/falls/steps", json=body).raise_for_status()
        made = {"trajectories": collapsing_step(number, fall_at(number))}
        self.http.post(f"/v1/runs/falls/steps/{number}/samples", json=made).raise_for_status()
        self.at += 1
        return number


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    server = serve_in_thread(ServeSettings(store=str(tmp_path_factory.mktemp("l") / "l.db"), port=0))
    going = Going(server.url)
    going.url = server.url
    while going.at < FIRST:
        going.step()
    about = {"config": {"lr": 1e-6, "loss": "grpo"}, "steps": 30}
    going.http.post("/v1/runs/falls/about", json=about).raise_for_status()
    yield going
    going.http.close()
    server.stop()


def next_step_is_drawn(page, run):
    number = run.step()
    last = page.locator("#runs tbody tr", has_text="falls").locator("td.n").first
    last.get_by_role("link", name=str(number), exact=True).wait_for()  # to its own tokens, which came later


def test_the_focus_stays_on_what_a_new_step_draws_again(run, browser):
    page = opened(browser, f"{run.url}/#runs=falls&pin=5")
    page.locator("#pinned summary").click()
    page.locator("figure:not([hidden]) .legend button").first.wait_for()
    places = {
        "the run's box": page.get_by_role("checkbox", name="falls"),
        "its menu": page.get_by_role("button", name="Change falls"),
        "the step's tokens": page.locator("#runs td.n a"),
        "why it is sick": page.get_by_role("button", name="Reason and advice"),
        "an alarm": page.locator("#alarms summary").first,
        "an alarm's mark": page.locator("#timeline .alarm-mark").first,
        "a detector's alarm": page.locator("#lanes > .lane button").first,
        "the quiet detectors": page.locator("#quiet-lanes summary"),
        "a curve's line": page.locator("figure:not([hidden]) .legend button").first,
        "the pinned values": page.locator("#pinned summary"),
        "the search of the pin": page.get_by_label("Search the values of the step"),
        "the end of the pin": page.get_by_role("button", name="Unpin"),
    }
    at = "[...document.querySelectorAll('a, button, input, summary')].indexOf(document.activeElement)"
    for name, place in places.items():
        place.focus()
        before = page.evaluate(at)
        # Drawn as after a step; that a real one is drawn so is tested below.
        page.evaluate("Unspiral.app.draw()")
        page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        assert page.evaluate(at) == before >= 0, name
        expect(place, name).to_be_focused()
    page.locator("#runs td.n a").focus()
    next_step_is_drawn(page, run)
    expect(page.locator("#runs td.n a")).to_be_focused()
    # Drawn while it is not known which steps have tokens, and then again.
    page.evaluate(
        "() => { window.known = Unspiral.keptStep; Unspiral.keptStep = () => null; Unspiral.app.draw(); }"
    )
    page.locator("#runs td.n span").wait_for()
    expect(page.locator("#runs td.n span")).to_be_focused()
    page.evaluate("() => { Unspiral.keptStep = window.known; Unspiral.app.draw(); }")
    page.locator("#runs td.n a").wait_for()
    expect(page.locator("#runs td.n a")).to_be_focused()
    assert page.errors == []
    page.close()


def test_a_line_is_hidden_by_the_keyboard_and_shown_again(run, browser):
    page = opened(browser, f"{run.url}/#runs=falls")
    line = page.locator("figure:not([hidden]) .legend button").first
    line.focus()
    page.keyboard.press("Enter")
    expect(line).to_have_attribute("aria-pressed", "false")
    page.keyboard.press("Enter")
    expect(line).to_have_attribute("aria-pressed", "true")
    page.close()


def test_words_that_are_typed_while_steps_come_arrive_whole(run, browser):
    page = opened(browser, f"{run.url}/#runs=falls&tab=about")
    find = page.get_by_label("Search the configuration")
    find.focus()
    page.keyboard.type("los")
    page.keyboard.press("Home")
    next_step_is_drawn(page, run)
    page.locator("tr[data-key=steps] td", has_text=str(run.at)).wait_for()
    page.keyboard.type("x")
    expect(find, "the place within the words stays too").to_have_value("xlos")
    page.keyboard.press("Backspace")
    shown = page.locator(".configuration tbody tr").filter(visible=True)
    expect(shown).to_have_text(["lossgrpo"])
    page.close()


def test_a_list_stays_where_it_was_moved_to(run, browser):
    for i in range(60):
        event = {"step": i, "kind": "note", "text": f"number {i}"}
        run.http.post("/v1/runs/falls/events", json=event).raise_for_status()
    page = opened(browser, f"{run.url}/#runs=falls")
    page.locator(".events li").nth(59).wait_for()
    # Found and moved in one: between two calls the page may draw another list in its place.
    page.evaluate("document.querySelector('.events').scrollTo(0, 120)")
    next_step_is_drawn(page, run)
    assert page.evaluate("document.querySelector('.events').scrollTop") == 120
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_no_value_of_a_run_lies_beside_the_window(run, browser, scheme):
    page = opened(browser, f"{run.url}/#runs=falls", 390, 844, color_scheme=scheme)
    page.locator("#runs td.n a").wait_for()
    # In one call each: between finding and measuring the page may draw other cells.
    assert page.evaluate("(({ scrollWidth, clientWidth }) => scrollWidth - clientWidth)" + BOX) == 0
    shown = page.evaluate(
        "[...document.querySelectorAll('#runs td')].map((e) => e.getBoundingClientRect().right)"
    )
    assert len(shown) == 8 and max(shown) <= 390
    named = page.evaluate(
        "[...document.querySelectorAll('#runs td.n')].map((e) => getComputedStyle(e, ':before').content)"
    )
    assert named[:2] == ['"Step"', '"Reward"'] and named[-1] == '"Alarms"'
    page.close()


def test_a_run_is_chosen_though_its_row_is_drawn_while_the_button_or_the_key_is_down(run, browser):
    page = opened(browser, f"{run.url}/#runs=falls")
    box = page.get_by_role("checkbox", name="falls")
    next_step_is_drawn(page, run)  # the first draws make the rows, later ones keep them
    box.scroll_into_view_if_needed()
    place = box.bounding_box()
    page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    page.mouse.down()
    page.evaluate("Unspiral.app.draw()")
    page.mouse.up()
    page.locator("#runs tbody tr.off").wait_for()
    box.focus()
    page.keyboard.down("Space")
    page.evaluate("Unspiral.app.draw()")
    page.keyboard.up("Space")
    page.locator("#runs tbody tr:not(.off)").wait_for()
    expect(box).to_be_checked()
    expect(box).to_be_focused()
    page.close()


def test_the_focus_comes_back_from_the_dialog_of_a_run_that_went_on(run, browser):
    page = opened(browser, f"{run.url}/#runs=falls")
    page.get_by_role("button", name="Change falls").focus()
    page.keyboard.press("Enter")
    page.get_by_role("dialog", name="Change falls").wait_for()
    next_step_is_drawn(page, run)
    page.keyboard.press("Escape")
    expect(page.locator("#runs button.edit")).to_be_focused()
    page.close()


def test_the_focus_stays_on_a_run_that_gets_another_title_and_on_the_button_for_hidden_ones(run, browser):
    run.http.post("/v1/runs/aside/steps", json={"step": 1, "metrics": {"a": 1.0}}).raise_for_status()
    run.http.patch("/v1/runs/aside", json={"hidden": True}).raise_for_status()
    page = opened(browser, f"{run.url}/#runs=falls")
    box = page.get_by_role("checkbox", name="falls")
    box.focus()
    run.http.patch("/v1/runs/falls", json={"title": "The one that falls"}).raise_for_status()
    page.evaluate("Unspiral.app.again(0)")
    page.locator("#runs .names", has_text="The one that falls").wait_for()
    expect(box).to_be_focused()
    more = page.get_by_role("button", name="Show 1 hidden")
    more.focus()
    page.keyboard.press("Enter")
    less = page.get_by_role("button", name="Leave hidden runs out")
    expect(less).to_be_focused()
    page.keyboard.down("Space")
    page.evaluate("Unspiral.app.draw()")
    page.keyboard.up("Space")  # the draw left the button that is pressed in its place
    expect(more).to_be_focused()
    run.http.patch("/v1/runs/falls", json={"title": None}).raise_for_status()
    run.http.delete("/v1/runs/aside").raise_for_status()
    page.close()
