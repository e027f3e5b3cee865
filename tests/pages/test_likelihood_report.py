"""Recorded runs: reading, replaying, and the report page (the latter in a real browser)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import typer
from chromium import CHROMIUM, browser  # noqa: F401
from places import DATA
from playwright.sync_api import expect
from typer.testing import CliRunner

from services.common.errors import UserError
from services.common.files import lock
from services.likelihood.cli import monitor_app
from services.likelihood.exports.report import write_report
from services.likelihood.exports.run_files import differences, read_run

app = typer.Typer()
app.add_typer(monitor_app, name="monitor")
LAB = DATA / "lab"
HOLD = """
import sys
from pathlib import Path
from services.common.files import lock
held = lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
"""


def run_folder(tmp_path, name, lab, lam):
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(LAB / f"{lab}.jsonl", folder / "metrics.jsonl")
    (folder / "config.yaml").write_text(
        f"run: {{name: {name}}}\nalgorithm: {{llds: {{lambda: {lam}}}}}\nseed: 1\n"
    )
    event = {"time": 1.0, "event": "evaluation", "step": 40, "mode": "greedy", "em": 0.5}
    (folder / "events.jsonl").write_text(
        json.dumps(event) + '\n{"event": "worker_lost", "worker": "w1", "step": 7}\n'
    )
    return folder


def frozen(path):
    html = path.read_text(encoding="utf-8")
    return json.loads(html.split('id="frozen">')[1].split("</script>")[0])


def test_a_report_is_one_file_with_the_runs_their_phases_and_what_differs(tmp_path):
    runs = [run_folder(tmp_path, "plain", "grpo_1", 0.0), run_folder(tmp_path, "llds", "llds5_1", 0.5)]
    out = write_report(runs, tmp_path / "out" / "report.html")
    html, data = out.read_text(encoding="utf-8"), frozen(out)
    assert "src=" not in html and 'href="/static' not in html and "Leon Sorokin" in html
    assert data["differences"] == [{"key": "algorithm.llds.lambda", "values": [0.0, 0.5]}]
    plain = data["runs"][0]
    assert (
        plain["run"] == "plain"
        and plain["phase"] == "collapsed"
        and plain["alarms"][0]["rule"] == "likelihood"
    )
    assert plain["series"]["series"]["eval/em_greedy"]["mean"][40] == 0.5
    assert plain["events"][1] == {"step": 7, "kind": "worker_lost", "text": "worker w1"}
    assert "step" not in plain["series"]["series"]


def test_a_report_has_every_held_out_score_however_many_other_events_followed(tmp_path):
    folder = run_folder(tmp_path, "plain", "grpo_1", 0.0)
    busy = [{"event": "retry", "step": 41, "n": n} for n in range(700)]
    alarms = [{"event": "alarm", "step": 42, "rule": "leak"}] * 600
    score = {"event": "evaluation", "step": 80, "mode": "greedy", "em": 0.25}
    with open(folder / "events.jsonl", "a") as f:
        f.writelines(json.dumps(event) + "\n" for event in [*busy, score, *alarms])
    (run,) = frozen(write_report([folder], tmp_path / "report.html"))["runs"]
    kinds = [(e["step"], e["kind"], e["text"]) for e in run["events"]]
    newest = [(41, "retry", f"n {n}") for n in range(200, 700)]
    first, *others, last = kinds
    assert first[:2] == (40, "evaluation") and last[:2] == (80, "evaluation") and others == newest
    assert run["events"][0]["data"] == {"metrics": {"eval/em_greedy": 0.5}}


def test_a_report_names_phases_by_the_rules_that_the_run_used(tmp_path):
    folder = run_folder(tmp_path, "plain", "grpo_1", 0.0)
    with open(folder / "config.yaml", "a") as f:
        f.write("monitor: {rules: {collapse_share: 0.0001}}\n")
    (run,) = frozen(write_report([folder], tmp_path / "report.html"))["runs"]
    assert "collapsed" not in {b["phase"] for b in run["bands"]}  # by the default rules it is
    (folder / "config.yaml").write_text("monitor: {rules: {lag_nats: 1}}\n")
    with pytest.raises(UserError, match=r"plain/config\.yaml: monitor\.rules: lag_nats"):
        write_report([folder], tmp_path / "report.html")


def test_names_that_are_markup_stay_text(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "</script><script>alert(1)</script>": 1.0}\n')
    html = write_report([tmp_path], tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<script>alert" not in html


def test_a_torn_last_line_and_steps_written_twice_are_read_rightly(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "x": 1}\n{"step": 1, "x": NaN}\n{"step": 1, "x": 3}\n{"step": 2, "x"'
    )
    run = read_run(tmp_path)
    assert run.metrics == [{"step": 0, "x": 1}, {"step": 1, "x": 3}]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ('{"step": 0}\n{"x": 1}\n', "metrics.jsonl, line 2: expected an object with a whole number `step`"),
        ('{"step": 0}\nnonsense\n{"step": 1}\n', "metrics.jsonl, line 2: not JSON"),
        ("[1]\n", "metrics.jsonl, line 1: expected one JSON object a line"),
        (None, "no run's folder: "),
    ],
)
def test_a_broken_record_is_named_with_file_and_line(tmp_path, lines, says):
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text(lines)
    with pytest.raises(UserError) as caught:
        read_run(tmp_path)
    assert says in str(caught.value) and caught.value.exit_code == 2 and "\n" not in str(caught.value)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_on_a_phone_long_values_that_differ_lie_within_the_report(tmp_path, browser):
    runs = [run_folder(tmp_path, name, "grpo_1", 0.0) for name in ("one", "two")]
    for run in runs:
        with (run / "config.yaml").open("a") as file:
            file.write(f"model: {{path: /models/{'long-name-' * 8}{run.name}}}\n")
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(write_report(runs, tmp_path / "report.html").as_uri())
    page.locator("#differences td", has_text="long-name").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.close()


def test_differences_name_only_what_differs():
    a, b = (
        {"a": {"b": 1, "c": [1]}, "run": {"name": "x"}},
        {"a": {"b": 2, "c": [1]}, "d": 3, "run": {"name": "y"}},
    )
    assert differences([a, b]) == [{"key": "a.b", "values": [1, 2]}, {"key": "d", "values": [None, 3]}]


def test_monitor_replay_prints_phases_alarms_and_advice():
    done = CliRunner().invoke(app, ["monitor", "replay", str(LAB / "grpo_1.jsonl")])
    assert done.exit_code == 0
    assert "collapsed    steps 65 to 89" in done.output and "alarm at step 22 (probe/lag" in done.output
    as_json = json.loads(
        CliRunner().invoke(app, ["monitor", "replay", str(LAB / "l15n_1.jsonl"), "--json"]).output
    )
    assert as_json["alarms"] == [] and [p["phase"] for p in as_json["phases"]][:2] == ["unknown", "healthy"]


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_report_opens_without_a_network_and_shows_both_runs(tmp_path, browser):
    runs = [run_folder(tmp_path, "plain", "grpo_1", 0.0), run_folder(tmp_path, "llds", "llds5_1", 0.5)]
    out, asked, errors = write_report(runs, tmp_path / "report.html"), [], []
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.on("request", lambda r: asked.append(r.url) if r.url.startswith("http") else None)
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.goto(out.as_uri())
    page.wait_for_selector("figure:not([hidden]) canvas")
    assert page.locator("#timeline .lane .bar").count() == 2
    assert (
        page.locator("#timeline .bar")
        .first.get_attribute("aria-label")
        .endswith("collapsed from step 65 to 89")
    )
    assert (
        page.locator(".alarm").count() >= 4
        and "algorithm.llds.lambda" in page.locator("#differences").inner_text()
    )
    lag = page.locator("figure", has_text="Lag probe").first
    assert lag.locator(".legend button").count() == 2
    page.get_by_role("checkbox", name="llds").uncheck()
    expect(lag.locator(".legend button")).to_have_count(1)
    plot = lag.locator(".plot")
    plot.focus()
    page.keyboard.press("Home")
    expect(lag.locator(".unit")).to_have_text("step 0")
    page.keyboard.press("+")
    expect(page.locator("#unzoom")).to_be_visible()
    page.locator("#theme").click()
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.close()
    assert asked == [] and errors == []


def test_a_run_that_has_not_made_a_step_yet_has_a_report(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "events.jsonl").write_text(
        '{"event": "evaluation", "step": 0, "mode": "greedy", "overall": {"em": 0.25, "n": 200}}\n'
    )
    (run,) = frozen(write_report([tmp_path], tmp_path / "r.html"))["runs"]
    assert run["series"]["step"] == [] and run["phase"] == "unknown"
    (event,) = run["events"]
    assert event["text"] == ", greedy: EM 0.250, n 200"
    assert (event["step"], event["kind"]) == (0, "evaluation")
    assert event["data"] == {"metrics": {"eval/em_greedy": 0.25}, "overall": {"em": 0.25, "n": 200}}


@pytest.mark.parametrize(
    ("summary", "state", "text"),
    [
        ({"exit": 0}, "ended", "It finished."),
        (
            {"exit": 0, "stopped": "no better score for 5 evaluations"},
            "ended",
            "It finished early: no better score for 5 evaluations.",
        ),
        ({"exit": 130}, "stopped", "It was stopped by SIGINT (Ctrl-C) (exit status 130)."),
        ({"exit": 4}, "stopped by the monitor", "The monitor stopped it (exit status 4)."),
        ({"exit": 3}, "failed (3)", "It ended with an error (exit status 3)."),
        (None, "cut off", "No end was recorded: it was killed, or it still runs on another machine."),
    ],
)
def test_a_report_says_how_the_run_ended(tmp_path, summary, state, text):
    folder = run_folder(tmp_path, "plain", "grpo_1", 0.0)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    (run,) = frozen(write_report([folder], tmp_path / "r.html"))["runs"]
    assert run["ending"] == {"state": state, "text": text}


def test_a_report_tells_a_run_that_goes_on_from_one_that_writes_its_own_report(tmp_path):
    folder = run_folder(tmp_path, "plain", "grpo_1", 0.0)
    (folder / "summary.json").write_text('{"exit": 0}')
    with lock(folder / ".lock"):  # by this process, as a run holds it that has written its summary
        (run,) = frozen(write_report([folder], tmp_path / "r.html"))["runs"]
        assert run["ending"]["state"] == "ended"
    command = [sys.executable, "-c", HOLD, folder / ".lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        (run,) = frozen(write_report([folder], tmp_path / "r.html"))["runs"]
        other.communicate(b"\n", timeout=60)
    assert run["ending"] == {"state": "running", "text": "It was still running when this report was written."}


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_run_that_ended_before_its_first_step_does_not_fail_the_report_of_several(tmp_path, browser):
    first = tmp_path / "first"
    first.mkdir()
    (first / "config.yaml").write_text("run: {name: first}\ntrainer: {steps: 20}\n")
    (first / "summary.json").write_text('{"exit": 3, "steps": 0}')
    errors = []
    page = browser.new_page()
    page.on("pageerror", lambda e: errors.append(str(e)))
    out = write_report([first, run_folder(tmp_path, "plain", "grpo_1", 0.0)], tmp_path / "r.html")
    page.goto(out.as_uri())
    page.wait_for_selector("figure:not([hidden]) canvas")
    ended = page.locator("[data-run=first] .doing").inner_text()
    assert ended.splitlines()[0] == "How did it end?" and "failed (3)" in ended
    assert "step 89" in page.locator("[data-run=plain] .doing").inner_text()
    page.close()
    assert errors == []
