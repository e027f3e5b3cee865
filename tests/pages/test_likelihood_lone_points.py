"""Series of a single value in a real Chromium: there is no line to draw, and it is seen all the same."""

from __future__ import annotations

import json

import httpx
import pytest
from chromium import CHROMIUM, browser, opened, until  # noqa: F401

from services.likelihood.exports.report import write_report
from services.likelihood.rest.launch import ServeSettings, serve_in_thread

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
STEPS = 6
LONE = 3
# Pixels of a chart in the colour of its first line, right of the axis of values.
DRAWN = """(title) => {
  const titled = (f) => f.querySelector("strong")?.textContent === title;
  const figure = [...document.querySelectorAll("figure:not([hidden])")].find(titled);
  const canvas = figure?.querySelector("canvas");
  if (!canvas) return 0;
  const stroke = figure.querySelector(".legend line").getAttribute("stroke");
  const wanted = [1, 3, 5].map((k) => parseInt(stroke.slice(k, k + 2), 16));
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let i = 0; i < data.length; i += 4) if (wanted.every((part, k) => data[i + k] === part)) found++;
  return found;
}"""


def metrics(step):
    """Of one step; probes are made at one of them alone, between steps without."""
    of_all = {"reward/mean": 0.5, "logp/control": -0.2 - step / 10}
    return of_all | ({"probe/fixed": -0.11, "probe/control": -0.4, "own/one": 2.0} if step == LONE else {})


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The same run as a report and on the live page."""
    folder = tmp_path_factory.mktemp("lone")
    rows = [json.dumps({"step": step} | metrics(step)) for step in range(1, STEPS + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    report = write_report([folder], folder / "report.html").as_uri()
    server = serve_in_thread(ServeSettings(store=str(folder / "likelihood.db"), port=0))
    for step in range(1, STEPS + 1):
        body = {"step": step, "metrics": metrics(step)}
        httpx.post(f"{server.url}/v1/runs/lone/steps", json=body).raise_for_status()
    yield {"report": f"{report}#others=1", "live page": f"{server.url}/#runs=lone&others=1"}
    server.stop()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("place", ["report", "live page"])
def test_a_single_value_is_a_dot(browser, places, place, scheme):
    page = opened(browser, places[place], color_scheme=scheme)
    for title in ("Fixed probe", "Tags", "own/one"):
        until(page, f"({DRAWN})({json.dumps(title)}) >= 8")
    page.close()


def test_a_line_of_more_values_has_no_dots(browser, tmp_path):
    """A dot a step would hide a long line; it stands where there are fewer than three values."""
    rows = [
        {"step": step, "reward/mean": 0.5, "grad_norm": 1.0 if step < 3 else None} for step in range(1, 9)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = opened(browser, write_report([tmp_path], tmp_path / "r.html").as_uri())
    until(page, f"({DRAWN})('Reward') > 0")
    shown = """(title) => Unspiral.app.everyChart().find((c) => c.definition.title === title)
      .u.series.slice(1).some((s) => s.points.show())"""
    assert page.evaluate(shown, "Gradient norm") is True
    assert page.evaluate(shown, "Reward") is False
    page.close()


def test_the_dot_goes_when_a_line_has_come(browser, tmp_path):
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "likelihood.db"), port=0))

    def post(step):
        body = {"step": step, "metrics": {"reward/mean": 0.5, "probe/fixed": -0.1}}
        httpx.post(f"{server.url}/v1/runs/grows/steps", json=body).raise_for_status()

    post(1)
    page = opened(browser, f"{server.url}/#runs=grows")
    dots = """Unspiral.app.everyChart().find((c) => c.definition.title === "Fixed probe").u?.series.slice(1)
      .some((s) => s.points.show())"""
    page.wait_for_selector("figure:not([hidden]) canvas")
    assert page.evaluate(dots) is True
    page.wait_for_selector(".status.live")
    for step in (2, 3):
        post(step)
    until(page, f"({dots}) === false")
    assert page.errors == []
    page.close()
    server.stop()
