"""A step that is posted while the live page reads its run, in a real Chromium."""

from __future__ import annotations

import httpx
import pytest
from chromium import CHROMIUM, browser, opened, until  # noqa: F401

from services.likelihood.rest.launch import ServeSettings, serve_in_thread

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
SLOW = """() => { const U = window.Unspiral, { source, app } = U, load = source.load.bind(source);
  clearTimeout(app.rereading); app.rereading = null; // that of its start would find the step anyway
  window.heard = 0;
  const heard = app.heard.bind(app);
  app.heard = (kind, data) => { heard(kind, data); if (kind === "step") window.heard++; };
  source.load = async (...given) => { const found = await load(...given); window.read = true;
    await new Promise((go) => (window.go = go)); return found; };
  app.select(["r"]).then(() => (window.selected = true));
  window.again = () => (source.load = load); }"""


def test_it_is_in_the_curves(browser, tmp_path):
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0))

    def step(number):
        body = {"step": number, "metrics": {"reward/mean": 0.5}}
        httpx.post(f"{server.url}/v1/runs/r/steps", json=body).raise_for_status()

    for number in range(3):
        step(number)
    page = opened(browser, f"{server.url}/#runs=r")
    until(page, "Unspiral.app.loaded.length === 1")
    page.evaluate(SLOW)
    until(page, "window.read === true")
    step(3)
    until(page, "window.heard === 1")
    page.evaluate("window.again(); window.go()")
    until(page, "window.selected === true")
    step(4)
    until(page, "Unspiral.app.loaded[0].series.step.join() === '0,1,2,3,4'")
    assert page.errors == []
    page.close()
    server.stop()
