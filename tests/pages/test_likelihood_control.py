"""The live page's way to a run's control plane: who may use it, what is passed on, and the buttons in a real
Chromium."""

from __future__ import annotations

import re
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from chromium import CHROMIUM, browser, until  # noqa: F401
from control_world import Run

from services.control.launch import serve_in_thread as serve_control
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from services.settings import ControlSettings

ID = "0123456789abcdef0123456789abcdef"
TOKEN = "s3cret-token"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


class Busy(Run):
    """A run whose state follows what it is asked."""

    def __init__(self):
        super().__init__()
        self.state = "running"

    async def status(self):
        return (await super().status()).model_copy(update={"state": self.state})

    async def pause(self):
        self.state = "paused"
        return await super().pause()

    async def resume(self):
        self.state = "running"
        return await super().resume()


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Makes a likelihood service and, with `control`, a control plane that a run `r` has announced there."""
    with ExitStack() as parts:

        def make(token=TOKEN, runs_token=TOKEN, url=None):
            run = Busy()
            for name, value in (("UNSPIRAL_API_TOKEN", runs_token),):
                monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
            control = parts.enter_context(
                serve_control(run, ControlSettings(host="127.0.0.1", port=0), print, ID)
            )
            monkeypatch.delenv("UNSPIRAL_API_TOKEN", raising=False)
            service = parts.enter_context(
                serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0, token=token))
            )
            http = parts.enter_context(
                httpx.Client(base_url=service.url, headers=BEARER if token else None, timeout=30)
            )
            body = {"step": 0, "metrics": {"reward/mean": 0.5}}
            http.post("/v1/runs/r/steps", json=body).raise_for_status()
            about = {"control": {"url": url or control.url, "id": ID}, "steps": 9}
            http.post("/v1/runs/r/about", json=about).raise_for_status()
            return run, service, http

        yield make


def test_requests_are_passed_on_to_the_run_that_holds_the_same_token(world):
    run, _, http = world()
    view = http.get("/v1/runs/r/control").json()
    assert view["passes_on"] and view["status"]["workers"][0]["id"] == "w0.1" and view["problem"] is None
    assert http.post("/v1/runs/r/control/pause").json()["text"] == "pauses"
    assert http.post("/v1/runs/r/control/workers/scale", json={"n": "all"}).json()["target"] == 0
    assert http.post("/v1/runs/r/control/workers/w0.1/drain").json()["text"] == "w0.1 drains"
    refused = http.post("/v1/runs/r/control/workers/w7.1/drain")
    assert (refused.status_code, refused.json()["detail"]) == (404, "no worker w7.1; there are w0.1")
    refused = http.post("/v1/runs/r/control/workers/scale", json={"n": 99})
    assert refused.status_code == 409 and "the cluster has CPU 2" in refused.json()["detail"]
    for n in (0, 1.5, True, "4", None):
        assert http.post("/v1/runs/r/control/workers/scale", json={"n": n}).status_code == 422
    assert run.asked == ["pause", ("scale", "all"), ("drain", "w0.1")]
    http.post("/v1/runs/r/about", json={"ended": 5.0, "exit": 0, "control": None}).raise_for_status()
    refused = http.post("/v1/runs/r/control/pause")
    assert (refused.status_code, refused.json()["detail"]) == (409, "run r: it serves no control plane now")
    assert http.get("/v1/runs/none/control").status_code == 404


def test_the_pages_cookie_other_sites_and_strangers_change_nothing(world):
    run, service, http = world()
    with httpx.Client(base_url=service.url, timeout=30) as page:
        assert page.get("/v1/runs/r/control").status_code == 401
        assert page.post("/login", data={"token": TOKEN}).status_code == 303
        assert page.get("/v1/runs/r/control").json()["status"]["state"] == "running"  # the cookie reads
        assert page.post("/v1/runs/r/control/pause").status_code == 401
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"}):
        assert http.post("/v1/runs/r/control/pause", headers=headers).status_code == 403
    assert run.asked == []


def test_a_service_without_a_token_shows_and_passes_nothing_on(world):
    run, _, http = world(token=None, runs_token=None)
    view = http.get("/v1/runs/r/control").json()
    assert not view["passes_on"] and view["status"]["state"] == "running"
    for path in ("pause", "resume", "workers/w0.1/drain"):
        refused = http.post(f"/v1/runs/r/control/{path}")
        assert refused.status_code == 403 and "set UNSPIRAL_API_TOKEN" in refused.json()["detail"]
    assert http.post("/v1/runs/r/control/workers/scale", json={"n": 1}).status_code == 403
    assert run.asked == []


def test_a_service_without_the_token_of_its_run_says_what_to_do(world):
    run, _, http = world(token=None)
    view = http.get("/v1/runs/r/control").json()
    assert view["status"] is None and run.asked == []
    for words in ("The run has a token, and this service has none", "UNSPIRAL_API_TOKEN", "unspiral pause"):
        assert words in view["problem"]
    assert "Bearer" not in view["problem"]


def test_the_token_goes_to_no_address_that_does_not_prove_to_hold_it(world):
    asked = []

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path.partition("?")[0], self.headers.get("Authorization")))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"run": "%s", "status": "ok", "proof": "%s"}' % (ID.encode(), b"0" * 64))

        do_POST = do_GET

        def log_message(self, *_):
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Stranger)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        _, _, http = world(url=f"http://127.0.0.1:{server.server_port}")
        assert http.post("/v1/runs/r/control/pause").status_code == 504
        assert "has another UNSPIRAL_API_TOKEN" in http.get("/v1/runs/r/control").json()["problem"]
    finally:
        server.shutdown()
        server.server_close()
    assert asked and all(seen == ("/healthz", None) for seen in asked)


def test_the_place_of_a_control_plane_is_an_address_and_nothing_else(world):
    _, _, http = world()
    for url in ("file:///etc/passwd", "http://h:1/path", "http://u:p@h:1", "h:1"):
        answer = http.post("/v1/runs/r/about", json={"control": {"url": url, "id": ID}})
        assert answer.status_code == 422, url


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_buttons_come_with_the_token_and_go_with_it(world, browser):
    run, service, http = world()
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.set_default_timeout(60_000)
    wrong = []
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.goto(service.url)
    page.get_by_label("API token").fill(TOKEN)
    page.get_by_role("button", name="Sign in").click()
    panel = page.locator("#control")
    panel.get_by_text("running").wait_for()
    assert panel.get_by_role("button").all_inner_texts() == ["Control this run"]
    panel.get_by_role("button").click()
    panel.get_by_label("API token").fill("wrong")
    panel.get_by_role("button", name="Use it").click()
    panel.get_by_text("That is not the token.").wait_for()
    panel.get_by_label("API token").fill(TOKEN)
    panel.get_by_role("button", name="Use it").click()
    panel.get_by_role("button", name="Pause").click()
    panel.get_by_role("status").get_by_text("pauses").wait_for()
    panel.get_by_role("button", name="Resume").click()
    panel.get_by_role("status").get_by_text("goes on").wait_for()
    panel.get_by_label("Workers wanted").fill("99")
    panel.get_by_role("button", name="Scale").click()
    panel.get_by_role("status").get_by_text("99 rollout workers ask for CPU 99").wait_for()
    panel.get_by_role("button", name="All").click()
    panel.get_by_role("status").get_by_text("all workers wanted").wait_for()
    panel.get_by_role("button", name="Drain w0.1").click()
    panel.get_by_role("status").get_by_text("w0.1 drains").wait_for()
    assert run.asked == ["pause", "resume", ("scale", "all"), ("drain", "w0.1")]
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href, "
    kept += "document.documentElement.outerHTML])"
    assert TOKEN not in page.evaluate(kept)
    page.reload()
    panel.get_by_text("running").wait_for()
    assert panel.get_by_role("button").all_inner_texts() == ["Control this run"]
    http.post("/v1/runs/r/about", json={"ended": 5.0, "exit": 0, "control": None}).raise_for_status()
    panel.get_by_text("running").wait_for(state="detached")
    assert panel.inner_text() == "" and wrong == []
    page.close()


# Keeps back what the control plane says, until `free`.
KEEP_BACK = """() => { const { source, app } = Unspiral, get = source.get.bind(source);
  window.held = [];
  source.get = (path) => window.free || !path.endsWith("/control") ? get(path)
    : get(path).then((said) => new Promise((go) => held.push(() => go(said))));
  Unspiral.lookAtControl(app.loaded[0]); }"""


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_an_earlier_look_does_not_undo_what_was_pressed_and_the_card_says_paused(world, browser):
    _, service, _ = world()
    page = browser.new_page()
    page.set_default_timeout(60_000)
    page.goto(service.url)
    page.get_by_label("API token").fill(TOKEN)
    page.get_by_role("button", name="Sign in").click()
    panel = page.locator("#control")
    panel.get_by_role("button", name="Control this run").click()
    panel.get_by_label("API token").fill(TOKEN)
    panel.get_by_role("button", name="Use it").click()
    panel.get_by_role("button", name="Pause").wait_for()
    page.evaluate(KEEP_BACK)
    until(page, "held.length > 0")
    page.evaluate("window.free = true")
    panel.get_by_role("button", name="Pause").click()
    panel.get_by_role("button", name="Resume").wait_for()
    page.evaluate("held.forEach((go) => go()), new Promise((done) => setTimeout(done))")
    assert panel.get_by_role("button", name="Resume").is_visible()
    assert panel.locator(".control-state").inner_text() == "paused"
    page.evaluate("Unspiral.drawFirst(Unspiral.app.loaded)")
    assert page.locator(".answer.doing .state").inner_text() == "paused"
    page.close()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_without_a_token_the_page_has_no_buttons_and_says_why(world, browser):
    _, service, _ = world(token=None, runs_token=None)
    page = browser.new_page()
    page.set_default_timeout(60_000)
    page.goto(service.url)
    page.locator("#control").get_by_text("no token").wait_for()
    assert page.locator("#control").get_by_role("button").count() == 0
    assert "w0.1 ready" in page.locator("#control").inner_text()
    page.close()


def with_a_clock(browser, service):
    """The page of a reader who has the token, whose clock goes on when told to; and its panel."""
    page = browser.new_page()
    page.set_default_timeout(60_000)
    page.clock.install()
    page.goto(service.url)
    page.get_by_label("API token").fill(TOKEN)
    page.get_by_role("button", name="Sign in").click()
    panel = page.locator("#control")
    return page, panel


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_keyboard_keeps_its_place_while_the_panel_is_drawn_anew(world, browser):
    run, service, _ = world()
    page, panel = with_a_clock(browser, service)
    panel.get_by_text("running").wait_for()

    def drawn_anew(state):
        """The panel shows another state than before."""
        run.state = state
        page.clock.fast_forward(5000)
        panel.locator(".control-state", has_text=re.compile(f"^{state}$")).wait_for()

    def focused():
        return page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent")

    page.keyboard.press("Tab")
    while focused() != "Control this run":
        page.keyboard.press("Tab")
    drawn_anew("paused")
    assert focused() == "Control this run"
    page.keyboard.press("Enter")
    page.keyboard.type(TOKEN[:4])
    drawn_anew("running")
    page.keyboard.type(TOKEN[4:])
    page.keyboard.press("Tab")
    drawn_anew("paused")
    assert focused() == "Use it"
    page.keyboard.press("Enter")
    panel.get_by_role("button", name="Resume").wait_for()
    assert page.evaluate("document.activeElement.className") == "panel control"
    page.keyboard.press("Tab")
    assert focused() == "Drain w0.1"
    drawn_anew("running")
    assert focused() == "Drain w0.1"
    page.keyboard.press("Enter")
    panel.get_by_role("status").get_by_text("w0.1 drains").wait_for()
    assert focused() == "Drain w0.1", "a pressed button keeps the focus"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    panel.get_by_role("button", name="Resume").wait_for()
    assert focused() == "Resume"
    page.keyboard.press("Tab")
    page.keyboard.type("1")
    drawn_anew("running")
    page.keyboard.type("2")
    assert panel.get_by_label("Workers wanted").input_value().endswith("12")
    assert run.asked == [("drain", "w0.1"), "pause"]
    page.close()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_run_that_cannot_be_asked_now_takes_no_words_from_the_form(world, browser):
    _, service, _ = world()
    page, panel = with_a_clock(browser, service)
    panel.get_by_role("button", name="Control this run").click()
    page.keyboard.type("s3")
    page.route("**/v1/runs/r/control", lambda route: route.abort())
    page.clock.fast_forward(5000)
    panel.get_by_text("the service did not answer").wait_for()
    assert "no token" not in panel.inner_text(), "nothing is known of that"
    page.keyboard.type("cret-token")
    assert panel.get_by_label("API token for control").input_value() == TOKEN
    page.unroute("**/v1/runs/r/control")
    page.keyboard.press("Enter")
    page.clock.fast_forward(5000)
    panel.get_by_role("button", name="Pause").wait_for()
    page.close()
