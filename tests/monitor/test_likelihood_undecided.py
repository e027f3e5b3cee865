"""Rules that cannot judge a run yet are told from rules that saw no sign: by the monitor, on the page, in the
report and on the terminal."""

from __future__ import annotations

import json

import httpx
import pytest
from chromium import CHROMIUM, browser, opened  # noqa: F401

from services.likelihood.evaluations import evaluation_event
from services.likelihood.exports.report import write_report
from services.likelihood.monitor.detectors.table import READS
from services.likelihood.monitor.phases import PhaseMonitor
from services.likelihood.records import StepRecord
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from services.likelihood.service import LikelihoodService
from services.likelihood.store.opening import open_store
from services.settings import MonitorRules
from trainer.commands.cli import main
from trainer.commands.work.in_words import run_in_words

NEVER = ("retrieval/empty", "retrieval/repeated", "retrieval/errors", "retrieval/blank")
FEW = "3 values, and its usual level takes 30"


def row(step):
    """One step of a run that posts all that the rules read, but for what is said of its searches."""
    names = {name for reads in READS.values() for name in reads} - {*NEVER, "reward/missing"}
    values = {name: 0.4 + 0.01 * (step % 3) for name in sorted(names)}
    values |= {name: -0.4 - 0.01 * (step % 3) for name in ("logp/control", "probe/control", "probe/fixed")}
    values |= {"llds/active_tokens": 3.0, "grad_norm": 1.0 + step % 3, "probe/lag": 0.01 * (step % 3)}
    values |= {"leak/logp_entropy": 0.0, "mismatch/abs_logp": 0.01, "groups/zero_variance": 0.3}
    return {"step": step, **values}


def after(steps):
    monitor = PhaseMonitor()
    for step in range(1, steps + 1):
        monitor.update(row(step))
    return monitor


def test_after_three_steps_a_rule_of_a_usual_level_cannot_judge_and_says_why():
    found = after(3).undecided()
    assert {rule for rule in READS if rule not in found} == {
        "nonfinite",
        "dead_batch",
        "no_reward",
        "reward_gap",
    }
    assert found["entropy_low"] == found["length"] == found["gradient"] == FEW
    assert found["collapse"] == "3 values of reward/mean, and 8 are needed"
    assert found["likelihood"] == "3 values of probe/lag, and 5 are needed"
    assert found["silent_llds"] == "3 values of llds/active_tokens, and 5 are needed"
    assert found["retrieval"] == f"no {' or '.join(NEVER)} recorded"


def test_what_was_seen_for_long_enough_is_judged_and_what_is_missing_never_is():
    assert set(after(60).undecided()) == {"retrieval"}
    assert set(PhaseMonitor().undecided()) == set(READS), "before the first step"


def test_a_standing_alarm_has_judged():
    monitor = PhaseMonitor()
    for step in range(3):
        monitor.update({"step": step, "reward/mean": 0.5, "grad_norm": None})
    assert "nonfinite" in monitor.open and "nonfinite" not in monitor.undecided()


def test_the_count_survives_a_restart_and_a_state_of_an_earlier_version_claims_nothing():
    monitor = after(3)
    again = PhaseMonitor()
    again.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    assert again.undecided() == monitor.undecided()
    earlier = monitor.state_dict()
    del earlier["counts"]
    again.load_state_dict(earlier)
    assert again.undecided() == {}


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "three"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(row(step)) + "\n" for step in (1, 2, 3)))
    return run


def output_of(capsys, *command):
    with pytest.raises(SystemExit) as end:
        main([*command])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_the_terminal_names_them_with_the_reason(folder, capsys):
    said = output_of(capsys, "monitor", "replay", str(folder))
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80
    waiting = after(3).undecided()
    shared = lines[lines.index(f"    {FEW}:") + 1 :][:3]
    assert [line.split()[0] for line in shared] == ["gradient", "entropy_low", "entropy_high"]
    assert f"  {len(waiting)} did not have what they need:" in lines
    assert f"  judged by 3 of {len(READS)} detectors:" in lines
    assert "    collapse           3 values of reward/mean, and 8 are needed" in lines
    as_json = output_of(capsys, "monitor", "replay", str(folder), "--json")
    assert json.loads(as_json)["undecided"] == after(3).undecided()
    summary = {"steps": 3, "phase": "unknown", "undecided": after(3).undecided()}
    assert run_in_words(summary).splitlines()[1] == (
        f"{len(after(3).undecided())} of 21 detectors did not have what they need to judge the run: "
        "unspiral monitor replay says what"
    )


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_page_and_report_show_a_third_state(browser, folder, tmp_path):
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "likelihood.db"), port=0))

    def post(step):
        metrics = {name: value for name, value in row(step).items() if name != "step"}
        body = {"step": step, "metrics": metrics}
        httpx.post(f"{server.url}/v1/runs/three/steps", json=body).raise_for_status()

    try:
        for step in (1, 2, 3):
            post(step)
        answer = httpx.get(f"{server.url}/v1/runs/three/phase").json()
        assert answer["undecided"] == after(3).undecided()
        live = opened(browser, f"{server.url}/#runs=three")
        report = browser.new_page()
        report.goto(write_report([folder], tmp_path / "report.html").as_uri())
        said = {live: ("17 cannot judge yet", "17 of 21 detectors cannot judge it yet.")}
        said[report] = (
            "17 did not have what they need",
            f"17 of 21 detectors did not have what they need: 11 of them had {FEW.replace('its', 'their')}.",
        )
        for page, (folded, told) in said.items():
            page.locator("#undecided-lanes summary", has_text=folded).wait_for()
            assert page.locator("#quiet-lanes summary").inner_text() == "4 saw no sign"
            page.locator("#undecided-lanes summary").click()
            reasons = page.locator("#undecided-lanes li").all_inner_texts()
            assert "3 values of reward/mean, and 8 are needed: collapse" in reasons
            assert any(text.startswith(f"{FEW}: gradient, entropy_low") for text in reasons)
            card = page.locator(".answer.sick").inner_text()
            assert told in card
        for step in range(4, 9):  # each step that is posted is taken in by the open page
            post(step)
        live.locator("#undecided-lanes", has_not_text="needed: collapse").wait_for()
        live.locator("#quiet-lanes", has_text="collapse").wait_for(state="attached")
        about = {"ended": 1.0, "exit": 0}
        httpx.post(f"{server.url}/v1/runs/three/about", json=about).raise_for_status()
        live.locator("#undecided-lanes summary", has_text="did not have what they need").wait_for()
        assert "detectors did not have what they need: " in live.locator(".answer.sick").inner_text()
        live.close()
        report.close()
    finally:
        server.stop()


def test_a_held_out_score_after_the_last_step_is_counted_as_a_replay_counts_it(tmp_path, capsys):
    """The live page, where no line follows the last evaluation, and a replay of the folder say the same."""
    run = tmp_path / "mine"
    run.mkdir()
    (run / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": s, "reward/mean": 0.1 * s} | ({"eval/em_greedy": 0.2} if s == 1 else {}))
            + "\n"
            for s in (1, 2, 3)
        )
    )
    scores = [(0, "before", 0.2), (3, "after", 0.4)]
    (run / "events.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "event": "evaluation",
                    "step": s,
                    "tag": tag,
                    "mode": "greedy",
                    "overall": {"em": em},
                    "time": 1.0,
                }
            )
            + "\n"
            for s, tag, em in scores
        )
    )
    replayed = json.loads(output_of(capsys, "monitor", "replay", str(run), "--json"))
    service = LikelihoodService(open_store(str(tmp_path / "likelihood.db")), MonitorRules())
    service.put_event(
        "mine", evaluation_event(0, 0, "before", "greedy", {"em": 0.2}, {"eval/em_greedy": 0.2})
    )
    for line in (run / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        service.put_step("mine", StepRecord(step=metrics.pop("step"), metrics=metrics))
    assert service.judged("mine")["undecided"]["reward_gap"].startswith("1 value of the held-out score")
    service.put_event("mine", evaluation_event(3, 0, "after", "greedy", {"em": 0.4}, {"eval/em_greedy": 0.4}))
    why = service.judged("mine")["undecided"]["reward_gap"]
    assert why == replayed["undecided"]["reward_gap"] == "2 values of the held-out score, and 3 are needed"


def test_the_score_that_lacked_but_came_after_the_last_step_is_told():
    monitor = PhaseMonitor()
    for step in (1, 2, 3):
        monitor.update({"step": step, "reward/mean": 0.5} | ({"eval/em_greedy": 0.2} if step < 3 else {}))
    two = "2 values of the held-out score, and 3 are needed"
    assert monitor.undecided()["reward_gap"] == two
    told = monitor.undecided(["eval/em_greedy"])
    assert told["reward_gap"] == f"{two}; one more came after the last step"
    assert told | {"reward_gap": two} == monitor.undecided()
