"""`unspiral report --paper`: the paper's figures from recorded runs, and what a run has not recorded."""

from __future__ import annotations

import json
import re

import pytest
import typer
from chromium import CHROMIUM
from places import ROOT
from typer.testing import CliRunner

from services.likelihood.cli import report
from services.likelihood.exports.report import write_report
from services.likelihood.exports.report_parts.paper_figures import FIGURES, paper_figures


def run_folder(tmp_path, name, **more):
    folder = tmp_path / name
    folder.mkdir()
    rows = [
        {"step": s, "reward/mean": 0.5, "grad_norm": 1.0, "rollout/searches": 2.0, **more} for s in range(9)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(f"run: {{name: {name}}}\n")
    return folder


def test_every_metric_of_a_figure_is_one_that_docs_name():
    page = (ROOT / "docs" / "metrics.md").read_text() + (
        ROOT / "services/likelihood/static/curves/page_curves.js"
    ).read_text()
    for figure in FIGURES:
        for chart in figure.charts:
            for key, _ in chart.lines:
                assert re.sub(r"p\d+$", "p10", key.rstrip("*")) in page, key  # /p50 stands for the rest


def test_figures_spell_out_actions_in_their_order_and_say_what_is_not_recorded():
    full = {
        "logp/right_action_10",
        "logp/right_action_2",
        "logp/right_action_x",
        "reward/mean",
        "nll/rounds_0",
    }
    found = paper_figures({"a": full, "b": {"reward/mean"}}, {"a": [], "b": []})
    made = {figure["title"]: figure for figure in found}
    by_action = made["5. Likelihood by action"]
    assert by_action["charts"][0]["lines"] == [
        ("logp/right_action_2", "action 3"),
        ("logp/right_action_10", "action 11"),
    ]
    assert "Right answers: not recorded in b." in by_action["note"]
    assert "Wrong answers: not recorded in a, b." in by_action["note"]
    assert made["6. Surprise by tool rounds"]["charts"][0]["lines"] == [("nll/rounds_0", "rounds 0")]
    assert "Reward: not recorded" not in made["1. Three phases"]["note"] and len(made) == 9
    assert "Not measured of a, b: unspiral displacement RUN" in list(made.values())[-1]["note"]


def test_the_command_writes_a_second_file_and_leaves_the_usual_report_alone(tmp_path):
    app = typer.Typer()
    app.command()(report)
    folder = run_folder(tmp_path, "plain")
    usual = write_report([folder], folder / "report.html").read_text()
    done = CliRunner().invoke(app, ["--paper", str(folder)])
    assert done.exit_code == 0 and done.output.strip().endswith("paper.html")
    html = (folder / "paper.html").read_text()
    data = json.loads(html.split('id="frozen">')[1].split("</script>")[0])
    assert len(data["paper"]) == len(FIGURES) and "U.PAPER = true" in html and "src=" not in html
    assert "U.PAPER = true" not in usual
    assert write_report([folder], folder / "report.html").read_text() == usual


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_page_draws_what_is_recorded_and_says_what_is_not(tmp_path):
    from playwright.sync_api import sync_playwright

    folders = [
        run_folder(tmp_path, "plain"),
        run_folder(tmp_path, "llds", **{"logp/right": -0.2, "other": 1.0}),
    ]
    out = write_report(folders, tmp_path / "paper.html", paper=True)
    errors = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.goto(out.as_uri())
        page.wait_for_selector("figure:not([hidden]) canvas")
        assert page.locator(".skip").get_attribute("href") == "#charts"
        sections = page.locator("#charts section.group:not([hidden])")
        assert sections.count() == len(FIGURES)
        first = sections.first.inner_text()
        assert "1. Three phases" in first and "Likelihood of right answers: not recorded in plain." in first
        assert sections.first.locator("figure:not([hidden])").count() == 3
        assert sections.nth(3).locator("figure:not([hidden])").count() == 0
        assert "not recorded in plain, llds" in sections.nth(3).inner_text()
        assert page.locator("h2", has_text="Other metrics").is_hidden()
        browser.close()
    assert errors == []
