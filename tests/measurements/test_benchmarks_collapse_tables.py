"""Tables, verdict and the committed form of a cell, from made-up runs with numbers worked out by hand."""

import gzip
import json

import pytest
from collapse_cells import made_up

from benchmarks.collapse.__main__ import main
from benchmarks.collapse.judged.collected import collect, read, read_all, reproducible
from benchmarks.collapse.judged.outcomes import COLUMNS, planned
from benchmarks.collapse.judged.sameness import faults, first_batches
from benchmarks.collapse.judged.tables import (
    arms_table,
    complete,
    contrasts_table,
    everything,
    runs_table,
    verdict,
)
from benchmarks.collapse.planned.arms import SEEDS, configuration
from benchmarks.collapse.planned.cells import MOST_FAILURES, Cell
from benchmarks.collapse.running.grid import check_sources, warm_file
from services.common.errors import UserError
from trainer.loop.update.matched_step import read_series


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """grpo .20 in all seeds; llds_0.5 .30 + .01 x (seed - 100); half_grpo .30 always; llds_0.2 not whole."""
    folder, out = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("results")
    for seed in SEEDS:
        for arm, em in (("grpo", 0.2), ("llds_0.5", 0.3 + (seed - 100) / 100), ("half_grpo", 0.3)):
            assert collect(made_up(folder, arm, seed, em), out) == "written"
    assert collect(made_up(folder, "llds_0.2", 100, 0.9), out) == "written"
    return out


def test_the_second_family_is_tested_by_itself(results, tmp_path):
    assert "Second family" not in everything(read_all(results))
    for seed in SEEDS:
        odd = (-1) ** seed / 500
        for arm, em in (("grpo", 0.2 + odd), ("llds_0.5", 0.3), ("nll", 0.25 - odd)):
            collect(made_up(tmp_path / "runs", arm, seed, em), tmp_path / "out")
    page = everything(read_all(tmp_path / "out"))
    first, second = page.split("## Second family (PLAN_SECOND.md)")
    assert "| nll | llds_0.5 | 10 | -0.050 |" in second.split("## Runs")[0] and "| nll | llds" not in first
    assert "| llds_0.5 | grpo |" in first and "| llds_0.5 | grpo |" not in second.split("## Runs")[0]


def rows_of(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_runs_table_has_every_number(results):
    row = rows_of(runs_table(read_all(results)))[0]
    # EM, steps, greedy, fall .5 - .2, log10 100, -.1 - -.3, share, entropy, searches
    assert row == [
        "grpo",
        "100",
        "0.200",
        "> 150",
        "0.500",
        "0.300",
        "2.000",
        "0.200",
        "0.250",
        "0.125",
        "2.000",
        "0",
    ]
    assert len(rows_of(runs_table(read_all(results)))) == 31


def test_the_arms_table_is_the_mean_over_seeds(results):
    rows = rows_of(arms_table(read_all(results)))
    assert [row[0] for row in rows] == ["grpo", "llds_0.5", "half_grpo", "llds_0.2"]
    assert [row[2] for row in rows] == ["10", "10", "10", "1"]
    assert rows[1][3:7] == ["0", "0.345", "150", "0.500"]
    assert rows[1][7] == "0.155"  # the best is the first, .5, and the end is .345 on average


def test_the_contrasts_table_by_hand(results):
    found = read_all(results)
    assert complete(found) == ("grpo", "llds_0.5", "half_grpo")
    rows = {(row[0], row[1]): row[2:] for row in rows_of(contrasts_table(found))}
    assert set(rows) == {("llds_0.5", "grpo"), ("half_grpo", "grpo"), ("llds_0.5", "half_grpo")}
    # Differences .10 to .19: all of one sign, so p = 2 / 1024; Holm over three: x 3.
    pairs, mean, span, p, adjusted = rows["llds_0.5", "grpo"]
    assert (pairs, mean, p, adjusted) == ("10", "+0.145", "0.0020", "0.0059")
    low, high = map(float, span.split(" to "))
    # The plain normal interval is .145 -+ 1.96 x .0287 / sqrt(10).
    assert (low, high) == (pytest.approx(0.127, abs=0.003), pytest.approx(0.163, abs=0.003))
    assert rows["half_grpo", "grpo"] == ["10", "+0.100", "+0.100 to +0.100", "0.0020", "0.0059"]
    # 0, .01, ... .09: one pair of ten is 0, so 4 of 1,024 flips reach the sum.
    pairs, mean, span, p, adjusted = rows["llds_0.5", "half_grpo"]
    assert (pairs, mean, p, adjusted) == ("10", "+0.045", "0.0039", "0.0059")


def test_the_verdict_needs_both_contrasts(results, tmp_path):
    found = read_all(results)
    said = verdict(found)
    assert said.endswith("Not refuted.")
    assert said.startswith("llds_0.5 minus grpo: +0.145, 95 % interval +0.1")
    # Half the rate as good as LLDS: refuted by the second contrast alone.
    for seed in SEEDS:
        made = made_up(tmp_path / "runs", "half_grpo", seed, 0.5)
        collect(made, tmp_path / "results")
    changed = found | {"half_grpo": read_all(tmp_path / "results")["half_grpo"]}
    assert verdict(changed).endswith(
        "Refuted: the interval of llds_0.5 minus half_grpo does not lie above 0."
    )


def test_an_interval_that_covers_0_refutes(results, tmp_path):
    for seed in SEEDS:
        collect(made_up(tmp_path / "runs", "grpo", seed, 0.3 if seed % 2 else 0.4), tmp_path / "results")
    changed = read_all(results) | read_all(tmp_path / "results")
    assert "Refuted: the interval of llds_0.5 minus grpo does not lie above 0." in verdict(changed)


def test_without_all_ten_seeds_there_is_no_verdict(results):
    found = read_all(results)
    found["grpo"] = {seed: result for seed, result in found["grpo"].items() if seed != 104}
    assert verdict(found) == "Undecided: not all ten seeds of grpo are there."
    assert verdict({}) == "Undecided: not all ten seeds of grpo, llds_0.5, half_grpo are there."
    assert "Undecided" in everything({})


def test_a_pair_without_the_outcome_is_left_out_and_counted(results):
    found = read_all(results)
    del found["grpo"][100].sampled[90]
    assert rows_of(contrasts_table(found))[0][2:4] == ["9", "+0.150"]
    assert verdict(found) == "Undecided: the primary outcome is missing for some seeds."


def test_the_page_is_whole(results):
    page = everything(read_all(results))
    for part in ("## Verdict", "## Primary outcome", "## Arms", "## Secondary outcomes", "## Runs"):
        assert part in page
    assert "nan" not in page
    assert "All arms of each seed share the warm start and the first batch." in page


def test_first_batches_that_differ_are_named(results, tmp_path):
    collect(made_up(tmp_path / "runs", "grpo", 103, 0.2, first_reward=0.4), tmp_path / "results")
    found = read_all(results)
    found["grpo"][103] = read_all(tmp_path / "results")["grpo"][103]
    assert faults(found) == ["the first batches of seed 103 differ"]
    assert first_batches(found).startswith(
        "The first batches of seed 103 differ. Nothing is concluded from them"
    )
    assert verdict(found).startswith("Undecided: the first batches of seed 103 differ.")
    assert faults(found, ("llds_0.5", "half_grpo")) == []


# -- the committed form


def test_a_collected_cell_holds_what_the_outcomes_need_and_is_small(tmp_path):
    cell = made_up(tmp_path / "runs", "grpo", 100, 0.2)
    file = warm_file(cell.folder, 100)
    file.parent.mkdir()
    file.write_text('{"sha256": "abc", "path": "x"}')
    assert collect(cell, tmp_path / "out") == "written"
    packed = tmp_path / "out/grpo/100.jsonl.gz"
    assert packed.stat().st_size < 4_000
    found = read(packed)
    assert found.header | {"fingerprint": 0, "versions": 0} == {
        "arm": "grpo",
        "seed": 100,
        "steps": 150,
        "died": False,
        "attempts": 1,
        "seconds": 200.0,
        "fingerprint": 0,
        "warm_start": "abc",
        "versions": 0,
    }
    assert set(found.rows[0]) == {"step", *COLUMNS}
    assert found.sampled == {step: 0.2 if step >= 60 else 0.5 for step in planned()}
    assert found.first_batch() == (0.5, 20.0, 2.0)


def test_the_same_bits_are_recognised_and_others_are_kept_out(tmp_path):
    out = tmp_path / "out"
    assert collect(made_up(tmp_path / "a", "grpo", 100, 0.2), out) == "written"
    before = (out / "grpo/100.jsonl.gz").read_bytes()
    again = made_up(tmp_path / "b", "grpo", 100, 0.2, extra={"time/step": 9.0, "rollout/tokens_per_s": 3.0})
    assert collect(again, out) == "same bits"
    other = made_up(tmp_path / "c", "grpo", 100, 0.2, extra={"logp/right": -0.1234567891})
    assert collect(other, out) == "other bits"
    assert (out / "grpo/100.jsonl.gz").read_bytes() == before
    assert collect(other, out, replace=True) == "written"
    # Every metric is in the fingerprint, so the bytes differ though the columns do not.
    with gzip.open(out / "grpo/100.jsonl.gz", "rt") as text:
        assert "logp" not in text.read()


def test_the_same_cell_gives_the_same_bytes(tmp_path):
    cell = made_up(tmp_path / "a", "grpo", 100, 0.2)
    for out in ("x", "y"):
        collect(cell, tmp_path / out)
    assert (tmp_path / "x/grpo/100.jsonl.gz").read_bytes() == (tmp_path / "y/grpo/100.jsonl.gz").read_bytes()


def test_a_cell_that_is_not_whole_is_not_collected_unless_it_died(tmp_path):
    cell = made_up(tmp_path / "a", "grpo", 100, 0.2, steps=80)
    assert collect(cell, tmp_path / "out") == "not ended"
    for _ in range(MOST_FAILURES):
        cell.failed(1)
    assert collect(cell, tmp_path / "out") == "written"
    found = read(tmp_path / "out/grpo/100.jsonl.gz")
    assert found.header["died"] and found.header["steps"] == 80


def test_an_arm_may_follow_a_collected_cell_whose_run_folder_is_not_there(tmp_path, capsys):
    out = tmp_path / "out"
    assert collect(made_up(tmp_path / "host", "llds_0.5", 100, 0.2), out) == "written"
    here = tmp_path / "here"
    follower = Cell("matched_step", 100, here)
    assert follower.source is not None and follower.source.run == here / "llds_0.5" / "100"
    assert main(["series", "--results", str(out), "--folder", str(here)]) == 0
    assert capsys.readouterr().out == "llds_0.5: 1 cell\n"
    assert follower.source is None
    check_sources([follower])
    followed = configuration("matched_step", 100, here)["learner"]["match_kl"]
    assert read_series(followed) == dict.fromkeys(range(1, 151), 0.001)
    other = Cell("matched_step", 101, here)
    with pytest.raises(UserError, match="or take it from a collected cell"):
        check_sources([other])
    assert main(["series", "--results", str(tmp_path / "none"), "--folder", str(here)]) == 1


def test_seeds_outside_the_plan_are_paired_beside_it(results, tmp_path):
    assert "outside the plan" not in everything(read_all(results))
    for seed, em in ((200, 0.2), (201, 0.3), (202, 0.4)):
        collect(made_up(tmp_path, "grpo", seed, 0.1), tmp_path / "out")
        collect(made_up(tmp_path, "llds_0.5", seed, em), tmp_path / "out")
    collect(made_up(tmp_path, "half_grpo", 202, 0.5), tmp_path / "out")
    text = everything(read_all(tmp_path / "out"))
    part = text.split("## Seeds outside the plan\n")[1].split("## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("| llds") or line.startswith("| half")]
    # .1, .2 and .3: of eight sign flips only +++ and --- reach their sum.
    assert rows[0].startswith("| llds_0.5 | grpo | 3 | +0.200 | +0.1") and rows[0].endswith("| 0.25 |")
    assert rows[1:] == [
        "| half_grpo | grpo | 1 | +0.400 | - | 1.00 |",
        "| llds_0.5 | half_grpo | 1 | -0.100 | - | 1.00 |",
    ]
    assert "Undecided: not all ten seeds" in text


def test_times_rates_and_attempts_are_not_of_the_fingerprint():
    row = {
        "step": 1,
        "time/step": 2.0,
        "rollout/tokens_per_s": 3.0,
        "attempt": 1,
        "entropy": 0.1,
        "phase": "healthy",
    }
    assert reproducible(row) == {"step": 1, "entropy": 0.1, "phase": "healthy"}


def test_of_an_evaluation_that_a_resumed_run_repeats_the_last_counts(tmp_path):
    cell = made_up(tmp_path / "a", "grpo", 100, 0.2)
    with open(cell.run / "events.jsonl", "a") as f:
        overall = {"em": 0.9, "f1": 0.9, "n": 500}
        f.write(json.dumps({"event": "evaluation", "step": 60, "mode": "sampled", "overall": overall}) + "\n")
    collect(cell, tmp_path / "out")
    assert read(tmp_path / "out/grpo/100.jsonl.gz").sampled[60] == 0.9
