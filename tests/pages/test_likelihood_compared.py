"""The difference of a long run to a short one is drawn over the steps that both have, not in a corner of the
long one's axis; phases are of whole runs all the same."""

from __future__ import annotations

import httpx
import pytest
from chromium import CHROMIUM, browser, until  # noqa: F401
from playwright.sync_api import expect

from services.likelihood.rest.launch import ServeSettings, serve_in_thread

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
AXIS = "Unspiral.app.range().join()"


def test_a_difference_has_the_axis_of_the_steps_of_both(tmp_path, browser):
    with serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0)) as server:
        for run, steps in (("short", 5), ("long", 60)):
            for step in range(1, steps + 1):
                body = {"step": step, "metrics": {"reward/mean": step / 100}}
                httpx.post(f"{server.url}/v1/runs/{run}/steps", json=body, trust_env=False).raise_for_status()
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"{server.url}/#runs=short,long")
        expect(page.locator("figure:not([hidden]) canvas").first).to_be_visible()
        until(page, f"{AXIS} === '1,60'")
        page.get_by_label("Draw").select_option("short")
        until(page, f"{AXIS} === '1,5'")
        expect(page.locator("#run-key li")).to_have_text(["long − short"])
        expect(page.locator("#timeline .axis span").last).to_have_text("step 60")
        page.get_by_label("Draw").select_option("")
        until(page, f"{AXIS} === '1,60'")
        page.close()
