"""CollapseBench: its plan against the code, causes and cures as configurations, faults that spare
evaluations, the grid and what it collects."""

from __future__ import annotations

import inspect
import re
import statistics
import sys
from types import SimpleNamespace

import pytest
import torch
from places import ROOT
from rich.console import Console

from benchmarks.barometer.judged import wilson
from benchmarks.collapse_bench import cells as cells_module
from benchmarks.collapse_bench import dose, plan, roc
from benchmarks.collapse_bench.__main__ import main
from benchmarks.collapse_bench.causes import BENCH, CAUSES, DOSE_CURVE, SECOND, Bf16Optimiser
from benchmarks.collapse_bench.cells import cells, run_grid
from benchmarks.collapse_bench.collected import Result, collect, read, read_all
from benchmarks.collapse_bench.effects import scores_of, student
from benchmarks.collapse_bench.plan import CURES, configuration
from benchmarks.collapse_bench.tables import FIRST, LAST, block, heat_map, judged, where_llds_loses
from services.contracts import Question, TrajectoryRequest
from services.likelihood.monitor.detectors.table import DETECTORS
from trainer.config.schema import parse_config


def test_the_plan_shows_what_the_code_runs():
    page = (ROOT / "benchmarks" / "collapse_bench" / "PLAN.md").read_text(encoding="utf-8")
    assert plan.causes_table() in page and plan.cures_table() in page
    assert f"```\n{plan.base_lines()}\n```" in page
    assert f"Seeds: {plan.SEEDS[0]} to {plan.SEEDS[-1]}" in page
    second = (ROOT / "benchmarks" / "collapse_bench" / "PLAN_SECOND.md").read_text(encoding="utf-8")
    assert plan.causes_table(SECOND) in second and "exact" not in BENCH + DOSE_CURVE
    assert len(BENCH) >= 11 and len(CURES) == 7 and len(DOSE_CURVE) == 6


def test_the_plan_of_doses_names_what_its_groups_run(tmp_path):
    page = (ROOT / "benchmarks" / "collapse_bench" / "PLAN_DOSE.md").read_text(encoding="utf-8")
    causes, cures = plan.chosen_causes(["curve"]), plan.chosen_cures(["curve"])
    for names in (causes, cures, plan.FIRST_SEEDS):
        *most, last = (f"`{name}`" if isinstance(name, str) else str(name) for name in names)
        assert f"{', '.join(most)} and {last}" in page
    found = cells(tmp_path, causes, cures, list(plan.FIRST_SEEDS))
    assert f"{len(found)} cells" in page and {cell.seed for cell in found[:12]} == {2000}
    assert set(DOSE_CURVE) - set(causes) == {"none", "mismatch"}


def test_every_cell_is_a_configuration_that_the_product_takes(tmp_path):
    for cause in CAUSES:
        for cure in CURES:
            config = parse_config(configuration(cause, cure, 2000, tmp_path))
            assert (config.algorithm.llds.lambda_ > 0) == (cure in ("llds_a", "llds_r", "sapo_search"))
    full = parse_config(configuration("high_rate", "grpo", 2000, tmp_path)).learner.lr
    assert parse_config(configuration("high_rate", "half_rate", 2000, tmp_path)).learner.lr == full / 2


def sampled(fault, step, training=True):
    uid = f"{step:06d}-0000-00" if training else "eval-step10-greedy-000000"
    fault.sampling([TrajectoryRequest(uid, uid, Question("q", "?", ("a",), "s"), 0)])
    return fault


@pytest.mark.parametrize("name", ["silent_tool", "noisy_retriever", "support_leak", "empty_documents"])
def test_a_fault_is_on_in_training_from_its_step_and_never_in_an_evaluation(name):
    cause = CAUSES[name]
    fault = cause.made(3)
    assert not sampled(fault, cause.begins - 1).on
    assert sampled(fault, cause.begins).on
    assert not sampled(fault, 0, training=False).on


def test_mismatch_samples_with_noise_in_training_and_with_the_learners_weights_in_evaluations():
    model = torch.nn.Linear(4, 4)
    fault = CAUSES["mismatch_0.8"].made(3)
    fault.engine(SimpleNamespace(_model=model), None, None)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fault.sent(weights, fault.begins - 2)
    sampled(fault, fault.begins - 1)
    assert torch.equal(model.weight, weights["weight"])
    fault.sent(weights, fault.begins)
    sampled(fault, fault.begins + 1)
    difference = (model.weight - weights["weight"]).std() / weights["weight"].std()
    assert 0.3 < difference.item() < 1.4
    sampled(fault, 0, training=False)
    assert torch.equal(model.weight, weights["weight"])


def test_a_bf16_optimiser_keeps_weights_and_moments_that_bfloat16_can_hold():
    weight, moment = torch.tensor([1.0]), torch.tensor([0.1])

    def step(lr):
        weight.add_(lr)
        return 1.0, True

    engine = SimpleNamespace(step=step, iter_master=lambda: [("w", weight, {"exp_avg": moment})])
    fault = Bf16Optimiser(3)
    fault.begins = 13
    rank = SimpleNamespace(engine=engine)
    sampled(fault, 11).updated(rank)
    assert engine.step is step
    sampled(fault, 12).updated(rank)
    sampled(fault, 13).updated(rank)
    assert engine.step(1e-4) == (1.0, True)
    assert float(weight) == 1.0 and torch.equal(moment, moment.bfloat16().float())


TRAIN = """
import json, pathlib, sys
run, status = pathlib.Path(sys.argv[1]), int(sys.argv[2])
run.mkdir(parents=True, exist_ok=True)
rows = [{"step": 1, "reward/mean": 0.5}, {"step": 2}]
(run / "metrics.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
event = {"event": "evaluation", "mode": "sampled", "step": 2, "tag": "step2", "overall": {"em": 0.25, "n": 8}}
(run / "events.jsonl").write_text(json.dumps(event) + chr(10))
(run / "summary.json").write_text(json.dumps({"exit": status, "steps": 2, "seconds": 1.0}))
sys.exit(status)
"""


def test_the_grid_skips_what_has_ended_tries_again_what_failed_and_collects_the_rest(tmp_path, monkeypatch):
    statuses = {"none+grpo-2000": [0], "none+kl-2000": [1, 0], "mismatch+grpo-2000": [1, 1]}
    started = []

    def command(cell):
        started.append(cell.name)
        return [sys.executable, "-c", TRAIN, str(cell.run), str(statuses[cell.name].pop(0))]

    monkeypatch.setattr(cells_module, "command_of", command)
    monkeypatch.setattr(cells_module, "warm_command", lambda seed: [sys.executable, "-c", "pass"])
    found = [
        *cells(tmp_path, ["none"], ["grpo", "kl"], [2000], steps=2),
        *cells(tmp_path, ["mismatch"], ["grpo"], [2000], steps=2),
    ]
    quiet = Console(quiet=True)
    assert run_grid(found, tmp_path, 3, quiet) == 1
    assert run_grid(found, tmp_path, 3, quiet) == 1
    assert run_grid(found, tmp_path, 3, quiet) == 0
    assert sorted(started) == sorted([*(c.name for c in found), "none+kl-2000", "mismatch+grpo-2000"])
    assert [cell.state() for cell in found] == ["ended", "ended", "failed"]
    out = tmp_path / "out"
    assert [collect(cell, out) for cell in found] == ["written", "written", "not ended"]
    kept = read(out / "none" / "grpo" / "2000.json.gz")
    assert kept.scores == {"sampled": {2: 0.25}} and kept.rows[0]["reward/mean"] == 0.5
    assert collect(found[0], out) == "same bits" and len(read_all(out)) == 2


def test_any_seed_can_be_run_and_is_collected_outside_the_plans_results(tmp_path, capsys):
    arguments = ["--folder", str(tmp_path), "--causes", "none", "--cures", "grpo", "--seeds", "2000,5"]
    assert main(["status", *arguments]) == 0
    assert main(["collect", *arguments]) == 2
    said = capsys.readouterr().err
    assert "--seeds 5: not in the plan, whose seeds are 2000 to 2009; --out FOLDER collects it" in said
    assert main(["collect", *arguments, "--out", str(tmp_path / "mine")]) == 0
    config = parse_config(configuration("none", "grpo", 5, tmp_path))
    assert config.data.train == "lab:train_questions:5"
    with pytest.raises(SystemExit):
        main(["grid", "--folder", str(tmp_path), "--seeds=-1"])


def test_names_outside_the_plan_are_refused_in_one_line(tmp_path, capsys):
    for arguments, says in (
        (["--causes", "hihg_rate"], "no such name; accepted: all, dose, second, curve, none"),
        (["--cures", "x"], "--cures x: no such name; accepted: all, curve, grpo"),
    ):
        assert main(["grid", "--folder", str(tmp_path), *arguments]) == 2
        assert says in capsys.readouterr().err


def made_up(cause, cure, seed, em, falls=False):
    rows = [
        {"step": step, "reward/mean": 0.1 if falls and step > 30 else 0.7, "probe/lag": 0.01}
        for step in range(1, plan.STEPS + 1)
    ]
    header = {"cause": cause, "cure": cure, "seed": seed, "cpu_seconds": 90.0}
    return Result(header, {"sampled": {0: 0.9, 36: em, 48: em + 0.02}}, rows)


def test_students_interval_is_that_of_the_book():
    found = student([0.1, 0.2, 0.3])
    # 4.3027 x .1 / sqrt(3)
    assert (found.pairs, found.mean, found.low) == (
        3,
        pytest.approx(0.2),
        pytest.approx(0.2 - 0.24841, abs=1e-4),
    )
    assert (
        found.word == ""
        and student([0.1, 0.11, 0.12]).word == "helps"
        and student([-0.1, -0.11]).word == "harms"
    )
    assert student([0.1]).word == "" and str(student([])) == "-"


def test_the_page_pairs_by_seed_and_says_where_llds_loses():
    made = []
    for seed, level in ((2000, 0.2), (2001, 0.4), (2002, 0.6)):
        made += [
            made_up("none", "grpo", seed, level + 0.3),
            made_up("mismatch", "grpo", seed, level, falls=True),
            made_up("mismatch", "llds_a", seed, level - 0.1),
            made_up("mismatch", "masks", seed, level + 0.2),
        ]
    assert scores_of(made)["mismatch", "grpo", 2000] == pytest.approx(0.21)
    text = block(made)
    row = next(line for line in text.splitlines() if line.startswith("| `mismatch` |"))
    assert "| 3 | 0.41 | **+0.30 (+0.30 to +0.30)** | **-0.10 (-0.10 to -0.10)** |" in row
    assert "**+0.20 (+0.20 to +0.20)**" in row and "`none+kl`" in text.split("Missing: ")[1].split("\n")[0]
    a, r = where_llds_loses(scores_of(made)).splitlines()
    assert "helps under no cause and harms under `mismatch`" in a and "better mean under `mismatch`." in a
    assert r == "- `llds_r`: not run yet."
    assert "of 3 (" in text.split("An alarm came in ")[1] and "of 9 (" in text
    drawn = heat_map(made)
    assert drawn.count("<rect") == len(BENCH) * 6 and "-0.10 *" in drawn and "+0.20 *" in drawn
    assert "-0.10 to -0.10<" in drawn and "+0.20 to +0.20<" in drawn


def dosed(level, llds, masks):
    """Cells of all doses: by seed, what exact match loses per unit of noise, and what cures gain by it."""
    made = []
    for place, seed in enumerate(plan.FIRST_SEEDS):
        for cause, size in dose.SIZES.items():
            em = 0.7 - level[place] * size
            for cure, gain in (("grpo", 0.0), ("llds_a", llds[place]), ("masks", masks[place])):
                made.append(made_up(cause, cure, seed, em + gain * size))
                for row in made[-1].rows:
                    row["mismatch/abs_logp"] = size / 2 if row["step"] > 13 else 9.0
    return made


def test_the_rise_along_the_doses_by_hand():
    made = dosed(level=(0.2, 0.25, 0.3), llds=(0.1, 0.11, 0.12), masks=(-0.1, 0.0, 0.1))
    scores = scores_of(made)
    fall = dose.rise(scores, "grpo")
    assert (fall.pairs, fall.mean) == (3, pytest.approx(-0.2))  # .25 x .8
    assert fall.high == pytest.approx(-0.2 + 4.3027 * 0.04 / 3**0.5, abs=1e-4)
    assert dose.rise(scores, "llds_a").mean == pytest.approx(0.088)
    text = dose.dose_section(made)
    assert text.startswith("36 of the 36 cells of `PLAN_DOSE.md` have run.")
    rows = [line for line in text.splitlines() if re.match(r"\| [0.]", line)]
    assert [row.split(" | ")[0][2:] for row in rows] == ["0", "0.05", "0.1", "0.2", "0.4", "0.8"]
    assert rows[5].startswith(
        "| 0.8 | 0.4 | 0.70 | 3 | 0.51 | **+0.09 ("
    )  # .7 - .25 x .8, and .01 by made_up
    assert "`grpo`: exact match falls with the dose: **-0.20 (-0.30 to -0.10)**, 3 seeds." in text
    assert "it helps more, the larger the dose: **+0.09 (+0.07 to +0.11)**, 3 seeds. LLDS-A is a cure" in text
    assert (
        "`masks`: no change of its effect with the dose was shown: +0.00 (-0.20 to +0.20), 3 seeds." in text
    )
    assert "Not run: `exact`" in text
    assert block(made, []).startswith("18 runs, seeds 2000, 2001, 2002")  # `none` and `mismatch` alone


def test_a_rise_is_read_as_the_plan_says_and_needs_all_six_doses():
    flat = dose.dose_section(
        dosed(level=(-0.1, 0.0, 0.1), llds=(0.1, 0.11, 0.12), masks=(-0.1, -0.11, -0.12))
    )
    assert "there was nothing to cure" in flat and "LLDS-A was not shown to be a cure" in flat
    assert "it helps less, the larger the dose" in flat
    made = dosed(level=(0.2, 0.25, 0.3), llds=(0.1, 0.11, 0.12), masks=(0.1, 0.1, 0.1))
    part = [one for one in made if one.key[0] != "mismatch_0.2" or one.key[2] == 2000]
    text = dose.dose_section(part)
    assert text.count("not known yet: 1 of the seeds has all six doses.") == 3 and "cure of" not in text
    assert text.startswith("30 of the 36") and "not known yet: 0 of the seeds have" in dose.dose_section([])


def lost(cause, seed, *, falls=False, slip=0.0):
    """A run whose lag probe slips by so many nats per token from step 15 on; its reward falls at 31."""
    made = made_up(cause, "grpo", seed, 0.5, falls)
    for row in made.rows:
        row["probe/lag"] = 0.0 if row["step"] < 15 else slip
    return made


def test_the_roc_counts_recall_lead_and_false_alarms_of_runs_that_fell_and_of_sound_ones():
    runs = roc.judged(
        [
            lost("high_rate", 2000, falls=True, slip=-0.5),  # named long before the fall
            lost("high_rate", 2001, falls=True, slip=-0.05),  # by thresholds half as wide alone
            lost("none", 2000),
            lost("none", 2001, slip=-0.03),  # sound; cried at by the widest thresholds alone
            lost("silent_tool", 2000, slip=-0.5),  # neither: something is wrong, and the reward holds
        ]
    )
    named, missed, quiet, near, other = runs
    family = roc.FAMILIES["likelihood"]
    assert [run.fell is not None for run in runs] == [True, True, False, False, False]
    assert [run.sound for run in runs] == [False, False, True, True, False]
    assert named.first(family) < 25 and missed.first(family) is None and other.first(family) is not None
    assert named.score(family) == 4.0 and missed.score(family) == 0.5
    assert quiet.score(family) == 0.0 and near.score(family) == 0.25
    assert str(roc.area([4.0, 0.5], [0.0, 0.25])).startswith("1.00")
    points = roc.curve(runs, family)
    assert points[0] == (0, 0) and points[-1] == (1, 1) and (0.0, 0.5) in points and (0.5, 1.0) in points
    text = roc.section(runs)
    row = next(line for line in text.splitlines() if line.startswith("| **likelihood** |"))
    assert "| 1 of 2 (0.09 to 0.91) | 1 |" in row and row.endswith("| 0 of 2 (0.00 to 0.66) |")
    assert "(2 runs). *Sound*" in text and "did not fall (2 runs). False alarms: 0 in 108 steps" in text
    assert roc.drawing(runs).count("<polyline") == 3
    assert str(roc.area([], [1.0])) == "-" and "0 of 0" in roc.section([])


def test_an_area_has_an_interval_that_narrows_with_runs_and_has_a_width_at_its_ends():
    found = roc.area([1.0, 2.0], [0.0, 1.0])  # ties count half, of four pairs
    assert found.area == 0.875 and found.low < 0.875 < found.high < 1.0
    one = roc.area([1.0], [0.0])  # of a single pair it is Wilson's interval of 1 in 1
    assert (one.area, one.low, one.high) == pytest.approx((1.0, *wilson(1, 1)), abs=1e-4)
    widths = []
    for n in (2, 10, 50):
        split = roc.area([1.0] * n, [0.0] * n)
        assert (split.area, split.high) == (1.0, 1.0)
        widths.append(1 - split.low)
        mirrored = roc.area([0.0] * n, [1.0] * n)
        assert (mirrored.low, mirrored.high) == pytest.approx((0.0, 1 - split.low))
    assert widths == sorted(widths, reverse=True) and 0.01 < widths[-1] < 0.05 < widths[1] < 0.25
    # Its own definition: the end is Z standard errors away, by the variance that holds there.
    theta = 1 - widths[1]
    spread = 1 + 9 * ((1 - theta) / (2 - theta) + theta / (1 + theta))
    assert 1 - theta == pytest.approx(roc.Z * (theta * (1 - theta) * spread / 100) ** 0.5, rel=1e-6)


def test_the_page_names_the_rules_that_are_the_same_all_along_the_curve():
    def scaled(rule):
        source = inspect.getsource(sys.modules[DETECTORS[rule].__module__])
        return any(re.search(rf"\b{name}\b", source) for name in roc.SCALED)

    assert [rule for rule in DETECTORS if not scaled(rule)] == list(roc.SAME_EVERYWHERE)
    text = roc.section([])
    assert all(f"`{name}`" in text for name in (*roc.SCALED, *roc.SAME_EVERYWHERE))


def test_the_page_holds_what_is_committed(tmp_path):
    page = ROOT / "docs" / "collapse_bench.md"
    committed = read_all()
    runs = judged(committed)
    made = block(committed, runs)
    assert page.read_text(encoding="utf-8").partition(FIRST)[2].partition(LAST)[0].strip() == made
    seconds = [result.header["seconds"] for result in committed if result.key[0] in BENCH]
    words = f"{min(seconds):.0f} to {max(seconds):.0f} s each, median {statistics.median(seconds):.0f}"
    assert words in page.read_text(encoding="utf-8")
    images = ROOT / "docs" / "images"
    if committed:
        assert (images / "collapse_bench.svg").read_text(encoding="utf-8") == heat_map(committed)
        assert (images / "collapse_bench_roc.svg").read_text(encoding="utf-8") == roc.drawing(runs)
    copy = tmp_path / "page.md"
    copy.write_text(f"a\n{FIRST}\nSTALE\n{LAST}\nb\n")
    assert main(["tables", "--results", str(tmp_path), "--page", str(copy)]) == 0
    assert copy.read_text() == f"a\n{FIRST}\nNo cell has been collected yet.\n{LAST}\nb\n"
