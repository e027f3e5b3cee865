"""A foreign page in a real browser, under a name that it has made to mean this machine, and under its own."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from chromium import CHROMIUM

from tests.common.gate_services import NAMES, POSTS, serving
from tests.retriever.retriever_fixtures import small_index  # noqa: F401

FETCH = """([url, method, body]) => fetch(url, {method, body, headers: {"content-type": "text/plain"}})
    .then((answer) => answer.text().then((text) => [answer.status, text]), (error) => [0, String(error)])"""


class Foreign(BaseHTTPRequestHandler):
    """A page of somebody else."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>foreign</title>")

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    rebound = "--host-resolver-rules=MAP evil.example 127.0.0.1"
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", rebound])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def foreign():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Foreign)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium on the PATH")
@pytest.mark.parametrize("name", NAMES)
def test_neither_a_rebound_name_nor_another_site_reads_or_changes_anything(
    tmp_path, small_index, browser, foreign, name
):
    path, body = POSTS[name]
    with serving(name, tmp_path, small_index) as served:
        page = browser.new_page()
        rebound = f"http://evil.example:{served.port}"
        assert page.goto(f"{rebound}/healthz").status == 403
        for asked in (
            ["/openapi.json", "GET", None],
            ["/metrics", "GET", None],
            [path, "POST", body.decode()],
        ):
            status, text = page.evaluate(FETCH, asked)
            assert status == 403 and "Host is localhost" in text
        page.goto(f"http://evil.example:{foreign}/")
        for asked in (["/metrics", "GET", None], [path, "POST", body.decode()]):
            status, text = page.evaluate(FETCH, [served.url + asked[0], *asked[1:]])
            assert status == 0 and "Failed to fetch" in text
        page.goto(f"{served.url}/docs")
        page.wait_for_selector("section h2")
        assert page.locator("section h2 code").first.inner_text().startswith("/")
        assert page.evaluate(FETCH, ["/metrics", "GET", None])[0] == 200
        page.close()
