"""The docs build into a site without a warning, and links of the pages outside it lead somewhere."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import badges
import pytest
from chromium import CHROMIUM, browser  # noqa: F401
from places import ROOT
from ruamel.yaml import YAML

PAGES = sorted(p.name for p in (ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextmanager
def served(folder) -> Iterator[str]:
    """A folder by HTTP, as a page's scripts need it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_builds_without_a_warning(site):
    loaded = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="https?://')
    for page in site.rglob("*.html"):
        assert not loaded.search(page.read_text(encoding="utf-8")), f"{page} loads from another host"


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_no_page_of_the_site_is_wider_than_the_window_or_has_a_script_that_fails(site, browser):
    page = browser.new_page()
    failed = []
    page.on("pageerror", lambda error: failed.append((page.url, str(error))))
    page.on("console", lambda m: failed.append((page.url, m.text)) if m.type == "error" else None)
    wide = []
    with served(site) as url:
        for file in sorted(site.glob("**/index.html")):
            page.goto(f"{url}/{file.parent.relative_to(site).as_posix()}/")
            for width in (390, 1440):
                page.set_viewport_size({"width": width, "height": 844})
                # The script that follows the headings runs when the page is scrolled.
                page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
                real = page.evaluate("document.documentElement.scrollWidth")
                if real > width:
                    wide.append((page.url, width, real))
    page.close()
    assert wide == [] and failed == []


def test_every_page_is_reached_from_the_navigation():
    nav = YAML(typ="safe").load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    groups = [next(iter(entry.values())) for entry in nav]
    assert groups[0] == "index.md" and len(groups) == 5
    named = ["index.md", *(page for g in groups[1:] for one in g for page in one.values())]
    assert sorted(named) == sorted([*PAGES, "readme.md"])  # which is the README (deploy/site_theme/hooks.py)


def test_the_first_page_leads_to_the_tutorial_first():
    assert LINK.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))[0] == "tutorial.md"


def test_the_badges_say_what_the_tree_says():
    assert badges.FILE.read_text(encoding="utf-8") == badges.drawn(badges.badges()), (
        "run tests/docs/badges.py"
    )
    assert "http" not in badges.FILE.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")


def test_the_pictures_of_the_readme_are_of_the_tree_and_small():
    shown = re.findall(r"!\[.+\]\((.+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(shown) >= 3 and all(name.startswith("docs/images/") for name in shown)
    assert sum((ROOT / name).stat().st_size for name in shown) < 400_000


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_of_the_front_pages_lead_to_files(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    missing = [target for target in LINK.findall(text) if not (ROOT / target).exists()]
    assert missing == []


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_on_a_phone_tables_with_sentences_are_told_row_by_row(site, browser):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    with served(site) as url:
        page.goto(f"{url}/monitor/")
        row = page.locator("tr", has_text="trajectories that are cut off")
        assert (
            page.evaluate("[...document.querySelectorAll('.wide')].filter((e) => e.scrollWidth > 390)") == []
        )
        assert row.locator("td").evaluate_all("(cells) => cells.map((c) => c.checkVisibility())") == [
            *(True, True, False, False, False, False)
        ]
        assert row.locator("td").nth(1).evaluate("(e) => getComputedStyle(e, '::before').content") == (
            '"a sign of"'
        )
        row.get_by_role("button", name="More about truncation").click()
        assert row.get_by_text("a higher limit of tokens").is_visible()
        page.get_by_role("button", name="open all rows").first.click()
        assert page.get_by_text("the questions became harder on purpose").is_visible()
        page.set_viewport_size({"width": 1440, "height": 844})
        assert row.locator("td").first.evaluate("(e) => getComputedStyle(e).display") == "table-cell"
        assert page.locator("button.more:visible").count() == 0
        page.set_viewport_size({"width": 390, "height": 844})
        page.goto(f"{url}/monitor_evidence/")  # numbers stay a table, in a frame that scrolls
        numbers = page.locator("table", has_text="GRPO, lr 1.5e-4")
        assert numbers.locator("td").first.evaluate("(e) => getComputedStyle(e).display") == "table-cell"
    page.close()


def test_the_page_of_an_alarm_says_first_what_it_means_and_what_to_do():
    text = (ROOT / "docs" / "monitor.md").read_text(encoding="utf-8")
    parts = re.findall(r"^## (.+)$", text, re.M)
    assert parts[:2] == ["Phases", "Detectors: what each alarm means, and what to do"]
    assert (
        any(part.startswith("Actions") for part in parts) and parts[-1] == "Right, wrong, untrained, unknown"
    )
