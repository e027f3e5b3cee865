"""The barometer: its plan and page against the code, what is broken on purpose, how a run is judged, the
grid, and one real cell."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from places import ROOT
from rich.console import Console

from benchmarks.barometer import cells as cells_module
from benchmarks.barometer import faults, plan
from benchmarks.barometer.__main__ import main, parser
from benchmarks.barometer.cells import Cell, cells, run_grid
from benchmarks.barometer.collected import RESULTS, Result, collect, read, read_all
from benchmarks.barometer.judged import fell, judge, poisson, wilson
from benchmarks.barometer.plan import HELD_OUT_SEEDS, KINDS, LOOKED_AT, chosen, configuration
from benchmarks.barometer.tables import (
    FIRST,
    LAST,
    everything,
    falls_table,
    healthy_table,
    leads_line,
    write_page,
)
from retriever_service.client import Hit
from services.common.errors import UserError
from services.common.files import lock
from services.contracts import Question, TrajectoryRequest
from services.likelihood.monitor.detectors.table import READS
from trainer.config.schema import parse_config


def test_the_plan_shows_what_the_code_runs():
    page = (ROOT / "benchmarks" / "barometer" / "PLAN.md").read_text(encoding="utf-8")
    assert plan.kinds_table() in page and f"```\n{plan.base_lines()}\n```" in page
    assert f"seeds {LOOKED_AT[0]} to {LOOKED_AT[-1]}" in page
    assert f"seeds {HELD_OUT_SEEDS[0]} to {HELD_OUT_SEEDS[-1]}" in page
    assert f"{plan.STEPS} steps of the system" in page


def test_no_seed_is_both_looked_at_and_held_out():
    assert not set(LOOKED_AT) & set(HELD_OUT_SEEDS) and len(HELD_OUT_SEEDS) >= 20
    assert not set(plan.SPENT) & set(HELD_OUT_SEEDS) and plan.split_of(plan.SPENT[0]) == "looked at"
    assert plan.split_of(LOOKED_AT[0]) == "looked at" and plan.split_of(HELD_OUT_SEEDS[0]) == "held out"
    with pytest.raises(UserError, match="--seeds 7: not in the plan"):
        plan.split_of(7)
    asked = {"held_out": list(HELD_OUT_SEEDS), "looked_at": list(LOOKED_AT), "900:902": [900, 901]}
    assert {text: parser().parse_args(["grid", "--seeds", text]).seeds for text in asked} == asked


def test_every_kind_is_a_configuration_that_the_product_takes_and_names_rules_that_exist(tmp_path):
    for name, kind in KINDS.items():
        parse_config(configuration(name, 1000, tmp_path))
        assert set(kind.expected) <= set(READS) and bool(kind.expected) == (kind.kind != "healthy")
        # The usual level of a metric is known before anything breaks: 30 values, and a mean of 5.
        assert kind.begins == 1 or 35 < kind.begins < plan.STEPS - 20
    assert chosen(["leak", "all"])[:2] == ["leak", "healthy"] and len(chosen(["leak", "all"])) == len(KINDS)
    with pytest.raises(UserError, match="--kinds hihg_rate"):
        chosen(["hihg_rate"])


INDEX = SimpleNamespace(documents=SimpleNamespace(count=9, get=lambda row: (str(row), f'"n{row}"\nbody')))
HITS = [Hit("a", '"n1"\nborn n2', 2.0), Hit("b", '"n3"\nborn n4', 1.0)]


def sampled(fault, step, training=True):
    uid = f"{step:06d}-0000-00" if training else "eval-step10-greedy-000000"
    fault.sampling([TrajectoryRequest(uid, uid, Question("q", "?", ("a",), "s"), 0)])
    return fault


@pytest.mark.parametrize("broken", [faults.SilentTool, faults.EmptyDocuments, faults.StuckRetriever])
def test_a_fault_of_the_retriever_begins_at_its_step_and_not_before(broken):
    fault = broken(3)
    before = sampled(fault, fault.begins - 1).found("q", HITS, INDEX)
    after = sampled(fault, fault.begins).found("q", HITS, INDEX)
    assert before == HITS and after != HITS
    held_out = sampled(fault, 0, training=False).found("q", HITS, INDEX)
    assert held_out == after and not fault.training  # an evaluation meets the same retriever


def test_chance_is_the_same_for_the_same_seed_and_step():
    for broken in (faults.NoisyRetriever, faults.FailingRetriever):
        one, two = (sampled(broken(3), 50) for _ in range(2))
        queries = [f"q{i}" for i in range(40)]
        found = [one.found(q, HITS, INDEX) for q in queries]
        again = [two.found(q, HITS, INDEX) for q in reversed(queries)][::-1]
        assert found == again and [f.failures for f in found] == [f.failures for f in again]
    assert 10 <= sum(f.failures for f in found) <= 30


def test_faults_of_the_reward_leave_the_held_out_score_alone():
    trajectory = SimpleNamespace(uid="u", finish="answer")
    for broken, paid in ((faults.PaidForForm, 1.0), (faults.JudgeDown, None)):
        fault = sampled(broken(3), 50 if broken is faults.PaidForForm else broken.begins)
        assert fault.reward(trajectory, 0.0) == paid
        assert sampled(fault, 0, training=False).reward(trajectory, 0.0) == 0.0
        assert sampled(fault, fault.begins - 1).reward(trajectory, 0.0) == 0.0
    down = faults.JudgeDown(3)
    assert sampled(down, down.begins + down.STEPS).reward(trajectory, 0.5) == 0.5


def test_a_reward_has_fallen_when_its_mean_stays_low():
    assert fell([0.8] * 40) is None and fell([]) is None
    assert fell([0.8] * 20 + [0.4] * 20) == 23  # the mean of 8 is .65 then, under .85 x .8
    assert fell([0.8] * 20 + [0.4] * 20, after=30) == 30
    assert fell([0.8] * 20 + [0.0] + [0.8] * 20) is None  # one step; the mean never leaves .7
    assert fell([0.8] * 20 + [None] * 5 + [0.4] * 20) == 28


def test_intervals_are_those_of_the_books():
    assert wilson(19, 20) == pytest.approx((0.7639, 0.9911), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    assert poisson(0) == pytest.approx((0.0, 3.6889), abs=1e-3)
    assert poisson(3) == pytest.approx((0.6187, 8.7673), abs=1e-3)


def result(kind, seed, rows):
    return Result({"kind": kind, "seed": seed, "warm_start": 0, "cpu_seconds": 80.0}, rows)


def quiet(step, **more):
    row = {"probe/lag": 0.01, "reward/mean": 0.7, "retrieval/empty": 0.0, "rollout/valid": 1.0}
    return {"step": step, **row, **more}


def test_an_alarm_before_the_fault_is_false_and_one_after_it_is_counted_by_its_rule():
    broken = [
        quiet(step, **({"retrieval/empty": 1.0, "reward/mean": 0.1} if step >= 40 else {}))
        for step in range(1, 73)
    ]
    found = judge(result("silent_tool", 1000, broken))
    assert found.false_alarms() == [] and found.counted and found.healthy_steps == 39
    named = found.named()
    assert named.rule == "retrieval" and 42 <= named.step <= 45
    assert found.fell == 41 and found.any_alarm() is not None
    early = [quiet(step, **({"rollout/valid": 0.2} if step > 33 else {})) for step in range(1, 73)]
    wrong = judge(result("silent_tool", 1001, early))
    assert [a.rule for a in wrong.false_alarms()] == ["validity"] and wrong.named() is None
    table = falls_table([found, wrong])
    assert "| `silent_tool` | searches return no document | 2 | 2 | 1 of 2 (0.09 to 0.91) | 1 of 2 |" in table
    assert "| before a fault | 2 | 78 | 1 | 12.8 (0.3 to 71.4) | `validity` 1 |" in healthy_table(
        [found, wrong]
    )


def test_a_driven_run_is_due_only_where_its_reward_fell():
    steady = judge(result("high_rate", 1000, [quiet(s) for s in range(1, 73)]))
    falls = [quiet(s, **({"probe/lag": -0.3} if s > 20 else {})) for s in range(1, 73)]
    falling = judge(
        result("high_rate", 1001, [r | ({"reward/mean": 0.1} if r["step"] > 40 else {}) for r in falls])
    )
    assert not steady.counted and steady.healthy_steps == 0 and falling.counted
    assert falling.named().rule == "likelihood" and falling.fell - falling.named().step > 10
    row = falls_table([steady, falling]).splitlines()[-1]
    assert "| 2 | 1 | 1 of 1 " in row and "1 of 2" in row


def test_the_page_says_where_there_are_too_few_runs():
    text = everything([result("leak", 1004, [quiet(s) for s in range(1, 73)])])
    assert text.startswith("**Held out**: 1 run, 1 seed (1004), 1 warm start, median 80 s of CPU per run; ")
    assert "no threshold, fault or metric was chosen by them. No kind has 20 runs: read the" in text
    enough = [result(k, s, [quiet(1)]) for k in KINDS for s in HELD_OUT_SEEDS]
    assert "read the intervals" not in everything(enough) and "20 seeds (1004 to 1023)" in everything(enough)
    fewer = everything([one for one in enough if one.header["seed"] > 1004 or one.kind == "leak"])
    assert f"{len(KINDS) - 1} of {len(KINDS)} kinds have less than 20 runs: read the intervals." in fewer


def test_the_page_says_what_the_seeds_were_used_for():
    spent, read_before = (result("leak", seeds[0], [quiet(1)]) for seeds in (plan.SPENT, LOOKED_AT))
    judged_first = "held out when first judged; since then they led to one change"
    assert judged_first in everything([spent]) and "show fit" not in everything([spent])
    assert "read while faults and metrics were made, so that they show fit." in everything([read_before])
    both = everything([spent, read_before])
    assert (
        f"; 900: read while faults and metrics were made, so that they show fit; 1000: {judged_first}" in both
    )


def test_the_page_says_how_many_kinds_are_named_after_the_fall():
    def one(kind, seed, alarm, falls):
        rows = [
            quiet(
                s, **({"probe/lag": -0.3} if s > alarm else {}), **({"reward/mean": 0.1} if s > falls else {})
            )
            for s in range(1, 73)
        ]
        return judge(result(kind, seed, rows))

    early, late = one("high_rate", 1000, 20, 50), one("high_rate_llds", 1000, 50, 20)
    assert leads_line([early, late]).endswith(
        "1 of the 2 kinds with a lead. The plan's aim, a median lead of 10 steps, is met in 1 of them."
    )
    assert "1 of the 1 kinds" in leads_line([late]) and leads_line([late]).endswith(
        "is missed in all of them."
    )
    assert leads_line([]) == ""


def test_the_page_holds_the_tables_of_what_is_committed(tmp_path):
    page = (ROOT / "docs" / "monitor_evidence.md").read_text(encoding="utf-8")
    shown = page.partition(FIRST)[2].partition(LAST)[0].strip()
    assert shown == everything(read_all(RESULTS))
    totals = [row.split("|")[3:6] for row in shown.splitlines() if row.startswith("| **all** ")]
    said = [f"{false.strip()} in {steps.strip()} {rate.strip()[4:]}" for steps, false, rate in totals]
    held_out, looked_at = said
    assert f"have {looked_at} in the runs that were looked at, and {held_out} in those held out" in page
    kinds = [row.split("|") for row in shown.partition("**Looked at**")[0].splitlines() if " of " in row]
    due, named, alarmed = (
        sum(int(row[n].split()[0]) for row in kinds if len(row) > 10 and row[1].strip().startswith("`"))
        for n in (4, 5, 6)
    )
    words = f"an alarm had to come {named} of {due} were named by one of the expected rules"
    assert f"{words}, and {alarmed} had an alarm" in page
    copy = tmp_path / "page.md"
    copy.write_text(f"a\n{FIRST}\nold\n{LAST}\nb\n")
    write_page([], copy)
    assert copy.read_text() == f"a\n{FIRST}\nNo cell has been collected yet.\n{LAST}\nb\n"
    copy.write_text("no marks")
    with pytest.raises(UserError, match="expected the lines"):
        write_page([], copy)


TRAIN = """
import json, pathlib, sys
run, status = pathlib.Path(sys.argv[1]), int(sys.argv[2])
run.mkdir(parents=True, exist_ok=True)
rows = [{"step": 1, "reward/mean": 0.5, "grad_norm": None, "other": 1}, {"step": 2}]
(run / "metrics.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
(run / "summary.json").write_text(json.dumps({"exit": status, "steps": 2, "seconds": 1.0}))
sys.exit(status)
"""


def test_the_grid_skips_what_has_ended_tries_again_what_failed_and_collects_the_rest(tmp_path, monkeypatch):
    statuses = {"healthy-900": [0], "leak-900": [1, 0], "high_rate-900": [1, 1, 0]}
    started = []

    def command(cell):
        started.append(cell.name)
        return [sys.executable, "-c", TRAIN, str(cell.run), str(statuses[cell.name].pop(0))]

    monkeypatch.setattr(cells_module, "command_of", command)
    found = cells(tmp_path, ["healthy", "leak", "high_rate"], [900], steps=2)
    quiet_console = Console(quiet=True)
    assert run_grid(found, tmp_path, quiet_console, turns=tmp_path / "turn") == 1
    assert run_grid(found, tmp_path, quiet_console) == 1
    assert run_grid(found, tmp_path, quiet_console) == 0  # high_rate has failed twice, and is left out
    assert started == ["healthy-900", "leak-900", "high_rate-900", "leak-900", "high_rate-900"]
    assert [c.state() for c in found] == ["ended", "ended", "failed"]

    out = tmp_path / "out"
    assert [collect(c, out) for c in found] == ["written", "written", "not ended"]
    kept = read(out / "healthy" / "900.json.gz")
    assert kept.rows == [{"step": 1, "reward/mean": 0.5, "grad_norm": None}, {"step": 2}]
    bits = (out / "healthy" / "900.json.gz").read_bytes()
    assert collect(found[0], out) == "same bits" and collect(found[0], out, replace=True) == "written"
    assert (out / "healthy" / "900.json.gz").read_bytes() == bits
    (found[0].run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.6}\n{"step": 2}\n')
    assert collect(found[0], out) == "other bits"
    assert len(read_all(out)) == 2


def test_two_grids_do_not_share_a_folder_and_a_seed_outside_the_plan_is_refused(tmp_path, capsys):
    held = lock(tmp_path / ".lock")
    with held, pytest.raises(UserError, match="another grid runs in it"):
        run_grid([], tmp_path, Console(quiet=True))
    assert main(["grid", "--folder", str(tmp_path), "--seeds", "5"]) == 2
    assert "not in the plan" in capsys.readouterr().err


@pytest.mark.slow
def test_a_cell_is_the_system_in_one_process_and_the_same_seed_gives_the_same_bits(tmp_path):
    """Three steps of a run whose searches fail at the first try from step 2 on."""
    script = (
        "import sys; from pathlib import Path; from benchmarks.barometer import faults, __main__ as m; "
        "faults.Fault.begins = 2; from benchmarks.barometer.cells import Cell; "
        "sys.exit(m.run_cell(Cell('failing_retriever', 900, Path(sys.argv[1]), 3)))"
    )
    prints = set()
    for name in ("one", "two"):
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / name)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        cell = Cell("failing_retriever", 900, tmp_path / name, 3)
        assert collect(cell, tmp_path / f"{name}_out") == "written"
        kept = read(tmp_path / f"{name}_out" / "failing_retriever" / "900.json.gz")
        prints.add(kept.header["fingerprint"])
    assert len(prints) == 1
    errors = [row["retrieval/errors"] for row in kept.rows]
    assert errors[0] == 0 and 0.2 < errors[1] < 0.8
    assert all(-2 < row["logp/control"] < 0 and 0 < row["text/non_words"] < 1 for row in kept.rows)
    assert "eval/em_greedy" in kept.rows[0] and kept.rows[0]["llds/active_tokens"] > 0
    events = [json.loads(line) for line in (cell.run / "events.jsonl").read_text().splitlines()]
    assert sum(e["event"] == "evaluation" for e in events) == 2
