"""Before a run's first step has ended: page, report and status say so, and what is done now, instead of
calling what cannot be there yet unknown or not recorded."""

from __future__ import annotations

import json
import time

import httpx
import pytest
from chromium import CHROMIUM, browser, opened  # noqa: F401
from control_world import Run
from playwright.sync_api import expect

from services.common.files import lock
from services.control.cli import recorded, show
from services.control.launch import serve_in_thread as serve_control
from services.control.records import RunStatus
from services.likelihood.exports.report import write_report
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from services.settings import ControlSettings
from trainer.loop.run.progress import Progress

NO_STEP = "No step has ended: the detectors judge from the first one on."
ID = "0123456789abcdef0123456789abcdef"
BEFORE = "before the first step: evaluation, greedy"
CARDS = "[data-run=early] .answer"


class Early(Run):
    """A run that is scored before its first step."""

    async def status(self):
        status = await super().status()
        return status.model_copy(update={"step": 0, "steps": 9, "stage": BEFORE, "rewards": []})


def begun(url, **more):
    """Post what a run says of itself at its start."""
    about = {"steps": 9, "started": time.time() - 30} | more
    httpx.post(f"{url}/v1/runs/early/about", json=about).raise_for_status()


@pytest.fixture
def url(tmp_path):
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0))
    yield server.url
    server.stop()


def browsed(test):
    here = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
    return pytest.mark.browser(here(test))


@browsed
def test_the_page_says_that_no_step_has_ended_and_what_is_done_now(browser, url):
    control = serve_control(Early(), ControlSettings(host="127.0.0.1", port=0), print, ID)
    begun(url, control={"url": control.url, "id": ID})
    page = opened(browser, f"{url}/#runs=early")
    expect(page.locator(f"{CARDS}.learning .big")).to_have_text("no step has ended yet")
    expect(page.locator(f"{CARDS}.sick")).to_contain_text("unknown: no step has ended yet")
    doing = page.locator(f"{CARDS}.doing")
    expect(doing).to_contain_text(f"Now, {BEFORE}; it began ")
    expect(doing.locator(".big")).to_have_text("no step of 9 has ended yet running")
    expect(page.locator("#lane-panel")).to_contain_text(NO_STEP)
    expect(page.locator("#runs tbody tr")).to_contain_text("unknown, no step has ended yet")
    everything = page.locator("body").inner_text()
    assert "not recorded" not in everything and "was posted" not in everything

    score = {"metrics": {"eval/em_greedy": 0.25}, "overall": {"em": 0.25, "n": 40}}
    event = {"step": 0, "kind": "evaluation", "text": "before", "data": score}
    httpx.post(f"{url}/v1/runs/early/events", json=event).raise_for_status()
    expect(page.locator(f"{CARDS}.learning")).to_contain_text("0.250 held-out EM, greedy")
    expect(page.locator("#lane-panel")).to_contain_text(NO_STEP)
    assert "not recorded" not in page.locator("body").inner_text()

    body = {"step": 1, "metrics": {"reward/mean": 0.5}}
    httpx.post(f"{url}/v1/runs/early/steps", json=body).raise_for_status()
    expect(doing).to_contain_text("step 1 of 9")
    expect(page.locator("#undecided-lanes")).to_contain_text("cannot judge yet")
    assert page.errors == []
    page.close()
    control.stop()


@browsed
def test_without_a_control_plane_the_page_says_since_when(browser, url):
    begun(url)
    page = opened(browser, f"{url}/#runs=early")
    expect(page.locator(f"{CARDS}.doing .big")).to_have_text("no step of 9 has ended yet ")
    expect(page.locator(f"{CARDS}.doing")).to_contain_text("It began 3")
    page.close()


@browsed
def test_a_run_that_ended_before_its_first_step_has_no_yet(browser, url):
    begun(url, ended=time.time(), exit=3)
    page = opened(browser, f"{url}/#runs=early")
    expect(page.locator(f"{CARDS}.doing .big")).to_have_text(
        "ended with an error before its first step of 9 "
    )
    expect(page.locator(f"{CARDS}.learning .big")).to_have_text("ended with an error before its first step")
    expect(page.locator("#runs tbody tr")).to_contain_text(
        "unknown, ended with an error before its first step"
    )
    page.close()


@browsed
@pytest.mark.parametrize("yet", [True, False], ids=["running", "cut off"])
def test_the_report_says_the_same(browser, tmp_path, yet):
    folder = tmp_path / "early"
    folder.mkdir()
    (folder / "config.yaml").write_text("run: {name: early}\ntrainer: {steps: 9}\n")
    before = {"event": "evaluation", "step": 0, "mode": "greedy", "overall": {"em": 0.25, "n": 40}}
    (folder / "events.jsonl").write_text(json.dumps(before) + "\n")
    if yet:
        with lock(folder / ".lock"):
            report = write_report([folder], folder / "report.html")
    else:
        report = write_report([folder], folder / "report.html")
    page = opened(browser, report.as_uri())
    doing, learning = ("no step of 9 has ended yet", "no step has ended yet")
    if not yet:
        doing, learning = ("cut off before its first step of 9", "cut off before its first step")
    expect(page.locator(f"{CARDS}.doing .big")).to_have_text(doing)
    expect(page.locator(f"{CARDS}.learning .big")).to_have_text(learning)
    expect(page.locator("#lane-panel")).to_contain_text(NO_STEP)
    expect(page.locator("#status")).to_have_text("report of 1 run, no step has ended")
    everything = page.locator("body").inner_text()
    assert "not recorded" not in everything and "was posted" not in everything
    assert page.errors == []
    page.close()


def test_a_status_says_it_too(capsys, tmp_path):
    show(RunStatus(state="running", run="r", steps=9, stage=BEFORE, phase="unknown"))
    said = capsys.readouterr().out
    assert f"steps done:       none of 9 yet ({BEFORE})\n" in said
    assert "phase:            unknown: no step has ended yet\n" in said
    (tmp_path / "config.yaml").write_text("run: {name: early}\n")
    show(recorded(tmp_path))
    assert "cut off, before its first step ended; its folder: " in capsys.readouterr().out


def test_a_stage_before_the_first_step_is_called_so():
    progress = Progress(9)
    progress.stage("evaluation, greedy", 0)
    assert progress.doing == BEFORE
    progress.stage("rollout", 1)
    assert progress.doing == "step 1: rollout"
