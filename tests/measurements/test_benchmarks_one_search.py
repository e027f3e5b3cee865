"""The comparison from a policy that searches once: its plan, its start, and its section from made-up runs."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from places import ROOT

from benchmarks.one_search.__main__ import main
from benchmarks.one_search.cells import RESULTS, Cell, collect, read_all
from benchmarks.one_search.plan import ARMS, CONTRASTS, SEEDS, STEPS, arms_table, configuration
from benchmarks.one_search.start import FIRST_WORLD, TWICE, shown
from benchmarks.one_search.tables import END, FIRST, block
from services.common.files import lock
from trainer.config.schema import parse_config
from trainer.lab.demonstrations import Library
from trainer.lab.world import make_world

PAGE = (ROOT / "docs/study.md").read_text(encoding="utf-8")


def made_up(folder, arm, seed, searches, beta=None):
    """A run whose searches rise from 1 in one line."""
    cell = Cell(arm, seed, folder)
    cell.run.mkdir(parents=True)
    rows = [
        {"step": step, "reward/mean": 0.4, "rollout/searches": 1 + (searches - 1) * (step - 1) / (STEPS - 1)}
        | ({} if beta is None else {"llds/beta": beta})
        for step in range(1, STEPS + 1)
    ]
    (cell.run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [
        {"event": "evaluation", "mode": mode, "step": step, "sources": {"lab_two_hop": {"em": em}}}
        for step, em in ((0, 0.0), (STEPS, searches - 1))
        for mode in ("greedy", "sampled")
    ]
    (cell.run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (cell.run / "summary.json").write_text(json.dumps({"exit": 0, "steps": STEPS, "cpu_seconds": 90.0}))
    return cell


def test_the_plan_states_what_the_code_runs():
    plan = (ROOT / "benchmarks/one_search/PLAN.md").read_text(encoding="utf-8")
    assert arms_table() in plan
    assert f"seeds {SEEDS[0]} to {SEEDS[-1]}" in plan and f"{STEPS} steps" in plan
    assert all(f"`{arm}` minus `{control}`" in plan for arm, control in CONTRASTS)


def test_arms_differ_in_llds_alone(tmp_path):
    configs = {arm: parse_config(configuration(arm, 3000, tmp_path / "m", tmp_path)) for arm in ARMS}
    parts = {arm: c.model_dump(exclude={"run": True, "algorithm": {"llds"}}) for arm, c in configs.items()}
    assert all(part == parts["grpo"] for part in parts.values())
    weights = {arm: (c.algorithm.llds.lambda_, c.algorithm.llds.answer_weight) for arm, c in configs.items()}
    assert weights == {
        "grpo": (0.0, "off"),
        "llds_a": (0.5, "off"),
        "llds_ma_paper": (0.5, "paper"),
        "llds_ma_code": (0.5, "code"),
    }


def test_the_section_by_hand(tmp_path):
    out = tmp_path / "out"
    for place, seed in enumerate(SEEDS[:3]):
        ends = {
            "grpo": 1.5,
            "llds_a": 1.2,
            "llds_ma_paper": 1.41 + place / 100,
            "llds_ma_code": 1.2 + place / 10,
        }
        for arm, searches in ends.items():
            beta = {"llds_ma_paper": 0.55, "llds_ma_code": 0.05}.get(arm)
            made = made_up(tmp_path, arm, seed, searches, beta)
            assert collect(made, out) == "written" and collect(made, out) == "same bits"
    text = block(read_all(out))
    assert text.startswith(f"12 runs of {STEPS} steps, median 90 s of CPU each (")
    assert "seeds with all arms: 3000, 3001, 3002 (the plan has 3000 to 3004)." in text
    # Searches rise in a line: the last ten steps of 48 have 42.5 / 47 of the rise, all steps half of it.
    assert "| `grpo` | plain GRPO | 3 | 1.00 | 1.45 | 1.25 | - | 0.00 | 0.50 |" in text
    assert "| 3 | 1.00 | 1.38 | 1.21 | 0.55 | 0.00 | 0.42 |" in text
    paper, code, llds = text.splitlines()[-3:]
    # Halves of .21, .22 and .23: mean .11; half-width 4.3027 x .005 / sqrt(3) = .0124.
    assert paper == "- `llds_ma_paper` minus `llds_a`: more searches: **+0.11 (+0.10 to +0.12)**, 3 seeds."
    assert "no difference of searches was shown: +0.05 (" in code
    assert llds == "- `llds_a` minus `grpo`: fewer searches: **-0.15 (-0.15 to -0.15)**, 3 seeds."
    assert block(read_all(out)[:1]).count("not known yet") == 3


def test_two_grids_do_not_share_a_folder(tmp_path, capsys):
    with lock(tmp_path / ".lock"):
        assert main(["grid", "--folder", str(tmp_path)]) == 2
    assert "another grid runs in it" in capsys.readouterr().err


def test_a_cut_cell_is_not_collected_and_any_seed_can_be_collected_elsewhere(tmp_path, capsys):
    cell = made_up(tmp_path, "grpo", 3000, 1.5)
    (cell.run / "summary.json").write_text(json.dumps({"exit": 130, "steps": 12}))
    assert collect(cell, tmp_path / "out") == "not ended"
    made_up(tmp_path, "grpo", 5, 1.5)
    arguments = ["collect", "--folder", str(tmp_path), "--arms", "grpo", "--seeds", "5"]
    assert main(arguments) == 2
    assert "--seeds 5: not in the plan, whose seeds are 3000 to 3004; --out" in capsys.readouterr().err
    assert main([*arguments, "--out", str(tmp_path / "mine")]) == 0
    assert [result.key for result in read_all(tmp_path / "mine")] == [("grpo", 5)]


def test_the_page_holds_the_section_of_the_committed_runs(tmp_path):
    shown = PAGE.partition(FIRST)[2].partition(END)[0].strip()
    assert shown == block(read_all(RESULTS)), (
        "run: python -m benchmarks.one_search tables --page docs/study.md"
    )
    page = tmp_path / "page.md"
    page.write_text(f"a\n{FIRST}\nOLD\n{END}\nb\n")
    assert main(["tables", "--page", str(page)]) == 0
    assert page.read_text() == f"a\n{FIRST}\n{shown}\n{END}\nb\n"


def test_the_start_is_shown_one_search_and_an_answer_and_seldom_two():
    library = Library(make_world(FIRST_WORLD))
    rng = random.Random(0)
    seen = Counter()
    for question in library.world.questions:
        *searches, answer = [text for text, learnt in shown(question, library, rng) if learnt]
        assert all("<search>" in text for text in searches) and "<search>" not in answer
        seen[len(question.hops), len(searches), f"<answer> {question.answer} </answer>" in answer] += 1
    assert set(seen) == {(1, 1, True), (2, 1, False), (2, 2, True)}
    assert seen[2, 2, True] / (seen[2, 2, True] + seen[2, 1, False]) == pytest.approx(TWICE, abs=0.03)
