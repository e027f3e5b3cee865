"""What is said of curves and detectors, in a real Chromium: of lines that lie on each other, of a threshold
that the axis does not reach, of smoothing, and of the names of rules."""

from __future__ import annotations

import json
import re

import pytest
from chromium import CHROMIUM, browser, closed_well, opened, until  # noqa: F401
from places import ROOT

from services.likelihood.exports.report import write_report

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
STEPS = 12
HERE = ("file://", "data:", "blob:")
LANES = ROOT / "services" / "likelihood" / "static" / "curves" / "page_lanes.js"


def report(folder, *, lag=0.05):
    """The reward is the exact match; entropy and gradient norm are numbers of their own."""
    folder.mkdir(exist_ok=True)
    rows = [
        {
            "step": s,
            "reward/mean": s / 20,
            "reward/em": s / 20 + 1e-4,
            "grad_norm": 1 + s / 9,
            "grad_norm/max": 2 + s / 9,
        }
        | {"probe/lag": lag - s / 1000}
        for s in range(1, STEPS + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_report([folder], folder / "report.html").as_uri()


def figure(page, title):
    return page.locator("figure", has=page.locator("strong", has_text=re.compile(f"^{title}$")))


def dashes(page, title):
    lines = figure(page, title).locator(".legend line").all()
    return [line.get_attribute("stroke-dasharray") for line in lines]


def test_a_line_that_hides_an_earlier_one_is_dashed_and_no_other(browser, tmp_path):
    page = opened(browser, report(tmp_path / "run"), ours=HERE)
    until(page, "document.querySelectorAll('.legend line').length > 4")
    assert dashes(page, "Reward") == ["", "7 4"]
    assert dashes(page, "Gradient norm") == ["", ""]
    drawn = """(title) => Unspiral.app.everyChart().find((c) => c.definition.title === title)
      .u.series.filter((s) => s.width === 2).map((s) => (s.dash || []).length > 0)"""
    assert page.evaluate(drawn, "Reward") == [False, True]
    closed_well(page)


@pytest.mark.parametrize(
    ("lag", "said"), [(0.08, "alarm at -0.08, below this range"), (-0.075, ""), (-0.2, "")]
)
def test_a_threshold_that_the_axis_does_not_reach_is_said(browser, tmp_path, lag, said):
    page = opened(browser, report(tmp_path / "run", lag=lag), ours=HERE)
    found = figure(page, "Lag probe").locator(".legend .beyond")
    found.wait_for(state="attached")
    until(page, "Unspiral.app.everyChart().some((c) => c.u && c.definition.title === 'Lag probe')")
    assert found.text_content().replace("\u2212", "-") == said
    closed_well(page)


def test_smoothing_is_spoken_of_where_there_is_some(browser, tmp_path):
    page = opened(browser, report(tmp_path / "run"), ours=HERE)
    value = figure(page, "Reward").locator(".legend output").first
    heading = figure(page, "Reward").locator("details.values > summary")
    page.locator("#smooth").select_option("5")
    assert value.get_attribute("title") == "run: last value, and ~ smoothed over 5 points"
    assert heading.text_content() == "Values (smoothed as drawn)"
    page.locator("#smooth").select_option("1")
    assert value.get_attribute("title") == "run: last value" and heading.text_content() == "Values"
    closed_well(page)


def test_names_of_rules_say_what_each_is_a_sign_of(browser, tmp_path):
    page = opened(browser, report(tmp_path / "run"), ours=HERE)
    page.locator("#undecided-lanes > summary").click()
    name = page.locator("#undecided-lanes span", has_text=re.compile("^length$"))
    assert name.get_attribute("title") == "length: loops, a reward for length, or guesses"
    page.locator("#lane-help > summary").click()
    assert page.get_by_text("leak: tokens that are learnt but cannot be sampled").is_visible()
    closed_well(page)


def test_the_signs_of_the_page_are_those_of_the_table_in_monitor_md():
    text = LANES.read_text(encoding="utf-8")
    shown = re.findall(r'(\w+): "(.*?)",', re.search(r"U\.SIGNS = \{(.*?)\n  \};", text, re.S)[1])
    rows = [
        [cell.strip() for cell in row.strip("|").split(" | ")]
        for row in (ROOT / "docs" / "monitor.md").read_text(encoding="utf-8").splitlines()
        if re.match(r"\| `\w+` \| ", row) and row.count(" | ") == 5
    ]
    assert shown == [(cells[0].strip("` "), cells[1]) for cells in rows]
