"""Metrics that hold texts, lists or what is too large for a number: told, and nothing is judged by them."""

from __future__ import annotations

import json

import pytest
from command_line import fresh_folder, run  # noqa: F401
from test_likelihood_replay import replay, write_lines

from services.common.errors import UserError
from services.likelihood.exports.run_files import read_run

LARGE = "1" + 400 * "0"


@pytest.mark.parametrize("value", ['"hoch"', '"0.5"', "[0.5]", '{"mean": 0.5}', LARGE, "1e999"])
def test_a_value_that_is_no_number_raises_no_alarm_and_is_told(tmp_path, value):
    rows = [f'{{"step": {step}, "reward/mean": {value}, "probe/lag": 0.0}}\n' for step in range(1, 9)]
    (tmp_path / "m.jsonl").write_text("".join(rows))
    found = replay(tmp_path / "m.jsonl")
    assert found["alarms"] == [] and found["judged_by"] == ["probe/lag"]
    assert "reward/mean" not in found["missing"]
    shown = json.dumps(json.loads(value)) if value[0] in '"[{' else f'"{value}"'
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    assert found["no_numbers"] == {"reward/mean": f"8 values, the first in line 1: {shown}"}


def test_null_and_nan_are_values_that_there_were_not(tmp_path):
    rows = [{"step": step, "reward/mean": 0.5, "grad_norm": float("nan")} for step in range(1, 9)]
    rows += [{"step": 9, "reward/mean": None, "grad_norm": 1.0}]
    found = replay(write_lines(tmp_path / "metrics.jsonl", rows))
    assert {alarm["rule"] for alarm in found["alarms"]} == {"no_reward", "nonfinite"}
    assert found["no_numbers"] == {}


def test_some_texts_among_numbers_are_passed_over(run, tmp_path):
    rows = [{"step": step, "reward/mean": "hoch" if step == 3 else 0.5, "note": "x"} for step in range(6)]
    write_lines(tmp_path / "m.jsonl", rows)
    status, out, _ = run("monitor", "replay", "m.jsonl")
    assert status == 0 and "  judged by 1 of 21 detectors:\n" in out and "no alarm" in out
    assert '  no numbers (1 value, the first in line 4: "hoch"):\n    reward/mean\n' in out
    assert "note" not in out


@pytest.mark.parametrize("written", ["hoch", LARGE])
def test_a_table_says_so_too_and_by_its_own_names(run, tmp_path, written):
    lines = [f"{step},{written},0.5" for step in range(1, 9)]
    (tmp_path / "m.csv").write_text("\n".join(["step,reward,entropy", *lines]) + "\n")
    found = replay(tmp_path / "m.csv", "--map", "trl")
    assert found["alarms"] == [] and found["judged_by"] == ["entropy"]
    assert list(found["no_numbers"]) == ["reward"]
    assert found["no_numbers"]["reward"].startswith(f'8 values, the first in line 2: "{written[:40]}')


def test_a_file_without_a_number_that_a_rule_reads_is_refused_with_the_first(tmp_path):
    file = write_lines(tmp_path / "m.jsonl", [{"step": 1, "reward/mean": "hoch"}])
    says = r'reward/mean: holds no numbers \(1 value, the first in line 1: "hoch"\), so there is nothing'
    with pytest.raises(UserError, match=says):
        replay(file)


def test_the_report_judges_nothing_by_them_either(tmp_path):
    rows = [{"step": step, "reward/mean": "hoch"} for step in range(1, 9)]
    assert read_run(write_lines(tmp_path / "m.jsonl", rows)).replay()[1] == []
