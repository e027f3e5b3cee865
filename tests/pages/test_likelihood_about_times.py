"""The times of the tab "About" in a real Chromium: of a run that was resumed start and first post are of two
attempts, and say so."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import httpx
import pytest
from chromium import CHROMIUM, browser, opened  # noqa: F401
from playwright.sync_api import expect

from services.likelihood.rest.launch import ServeSettings, serve_in_thread

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
CREATED, LATER = 1_700_000_000.0, 1_700_000_100.0
AT, THEN = "2023-11-14 22:13:20 UTC", "2023-11-14 22:15:00 UTC"
TWO = (f"{THEN} (of this attempt)", f"{AT} (of an earlier attempt)")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("about") / "l.db"
    server = serve_in_thread(ServeSettings(store=str(path), port=0))
    yield server.url, path
    server.stop()


def asked(url, path, body):
    httpx.post(f"{url}/v1/runs/{path}", json=body).raise_for_status()


@pytest.mark.parametrize(
    ("run", "attempt", "started", "created", "stepped", "says"),
    [
        ("first", 0, CREATED, LATER, LATER + 1, (AT, THEN)),
        ("again", 1, LATER, CREATED, LATER + 1, TWO),
        # No step of the newest attempt has ended yet.
        ("going", 0, LATER, CREATED, CREATED, TWO),
        # The trainer's clock is ahead of the service's.
        ("ahead", 0, LATER, CREATED, LATER + 1, (THEN, AT)),
    ],
)
def test_start_and_first_post_say_of_which_attempt_they_are(
    browser, store, run, attempt, started, created, stepped, says
):
    url, path = store
    asked(url, f"{run}/steps", {"step": 1, "attempt": attempt, "metrics": {"reward/mean": 0.5}})
    asked(url, f"{run}/about", {"started": started})
    with closing(sqlite3.connect(path)) as table:  # the service takes these times from its clock
        number = table.execute("SELECT id FROM run WHERE name = ?", (run,)).fetchone()
        table.execute("UPDATE run SET created = ? WHERE id = ?", (created, *number))
        table.execute("UPDATE step SET time = ? WHERE run = ?", (stepped, *number))
        table.commit()
    page = opened(browser, f"{url}/#runs={run}&tab=about")
    for name, said in zip(("started", "first post"), says, strict=True):
        expect(page.locator(f".run-facts tr[data-key='{name}'] td")).to_have_text(said)
    counted = f"{attempt} (the first is 0)" if attempt else "0"
    expect(page.locator(".run-facts tr[data-key='attempt'] td")).to_have_text(counted)
    assert page.errors == [] and page.foreign == []
    page.close()
