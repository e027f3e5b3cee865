"""The design of the collapse study: its cells, and the plan that the page states."""

from pathlib import Path

import pytest
from places import ROOT
from ruamel.yaml import YAML

from benchmarks.collapse.__main__ import main
from benchmarks.collapse.judged.outcomes import END, EVERY, QUESTIONS, planned
from benchmarks.collapse.judged.power import paragraph
from benchmarks.collapse.planned.arms import (
    ARMS,
    BASE,
    CLAIM,
    FACTORIAL,
    FAMILIES,
    RUNNABLE,
    SEEDS,
    chosen,
    configuration,
    contrasts,
)
from benchmarks.collapse.planned.plan_page import arms_table, base_yaml, contrasts_line
from benchmarks.grids.command_line import numbers
from benchmarks.grids.leaves import leaves
from services.common.errors import UserError
from trainer.config.schema import dump_config, parse_config

PLAN = (ROOT / "benchmarks/collapse/PLAN.md").read_text(encoding="utf-8")
PLAN_SECOND = (ROOT / "benchmarks/collapse/PLAN_SECOND.md").read_text(encoding="utf-8")
DERIVED = {
    "gspo": {"algorithm.clip_low", "algorithm.clip_high"},
    "clip_cov": {"algorithm.clip_low", "algorithm.clip_high"},
    "kl_cov": {"algorithm.cov_share"},
}
"""Keys that a loss brings of its own."""


def resolved(arm, seed=100):
    return parse_config(configuration(arm, seed, Path("folder")))


def flat(config):
    return dict(leaves(config.model_dump(mode="json", by_alias=True)))


@pytest.mark.parametrize("arm", RUNNABLE)
def test_an_arm_differs_from_the_base_in_its_own_keys_alone(arm):
    base, mine = flat(resolved("grpo")), flat(resolved(arm))
    assert base.keys() == mine.keys()
    differ = {key for key in base if base[key] != mine[key]} - {"run.dir"}
    allowed = set(ARMS[arm].settings)
    if loss := ARMS[arm].settings.get("algorithm.loss"):
        allowed |= DERIVED[loss]
    if ARMS[arm].follows:
        allowed |= {"learner.match_kl"}
    assert differ <= allowed
    assert allowed - differ <= {"algorithm.loss"}, "a setting that changes nothing"
    for key, value in ARMS[arm].settings.items():
        assert mine[key] == (value.replace("SEED", "100") if isinstance(value, str) else value)


def test_two_seeds_of_an_arm_differ_in_what_names_the_seed_alone():
    one, other = flat(resolved("grpo", 100)), flat(resolved("grpo", 101))
    differ = {key for key in one if one[key] != other[key]}
    assert differ == {
        "run.name",
        "seed",
        "model.path",
        "data.train",
        "data.eval",
        "retriever.corpus",
        "evaluation.retriever.corpus",
    }


def test_no_two_arms_are_the_same():
    seen = {}
    for arm in RUNNABLE:
        text = dump_config(resolved(arm)).replace(f"folder/{arm}", "")
        assert seen.setdefault(text, arm) == arm


def test_the_cells_are_what_the_outcomes_expect():
    config = resolved("grpo")
    assert (config.trainer.steps, config.trainer.eval_every, config.evaluation.limit) == (
        END,
        EVERY,
        QUESTIONS,
    )
    assert config.evaluation.sampled and config.trainer.eval_at_ends and config.rollout.deterministic
    assert planned() == [0, 30, 60, 90, 120, 150]


def test_the_factorial_is_two_rates_by_three_lambdas():
    found = {(c.learner.lr, c.algorithm.llds.lambda_) for c in map(resolved, FACTORIAL)}
    assert found == {(rate, value) for rate in (3e-4, 1.5e-4) for value in (0.0, 0.2, 0.5)}
    assert list(SEEDS) == list(range(100, 110))


def test_each_arm_has_one_control_and_the_claim_needs_three_arms():
    pairs = contrasts()
    assert len(pairs) == len(set(pairs)) == len(FAMILIES[1])  # all but grpo, and the claim's second
    assert [arm for arm, _ in contrasts(family=2)] == list(FAMILIES[2])
    assert set(FAMILIES[1]) | set(FAMILIES[2]) == set(RUNNABLE) == set(ARMS)
    assert set(CLAIM) <= set(pairs)
    assert contrasts(("grpo", "llds_0.5")) == [("llds_0.5", "grpo")]
    assert all(ARMS[arm].control in ARMS for arm in ARMS if arm != "grpo")


def test_arms_come_in_the_order_of_the_plan_and_a_wrong_one_is_refused_by_name():
    assert chosen(["half_grpo", "grpo"]) == ["grpo", "half_grpo"]
    assert chosen(["factorial"]) == list(FACTORIAL)
    corners = {(c.learner.lr, c.algorithm.llds.lambda_) for c in map(resolved, chosen(["corners"]))}
    assert corners == {(rate, value) for rate in (3e-4, 1.5e-4) for value in (0.0, 0.5)}
    assert chosen(["all"]) == list(FAMILIES[1]) == [*FACTORIAL, *chosen(["variants"])]
    assert chosen(["matched_step", "nll"]) == ["nll", "matched_step"]
    assert chosen(["all", "second"]) == list(RUNNABLE)
    with pytest.raises(
        UserError, match="no such arm; accepted: factorial, variants, all, second, corners, grpo"
    ):
        chosen(["gpro"])


def test_a_wrong_arm_is_one_line_and_exit_status_2(tmp_path, capsys):
    assert main(["grid", "--folder", str(tmp_path / "f"), "--arms", "nil"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no such arm" in said
    assert not (tmp_path / "f").exists()
    assert main(["needs"]) == 0
    assert capsys.readouterr().out == "every arm can be run\n"


def test_an_arm_that_follows_another_is_refused_until_that_cell_is_there(tmp_path, capsys):
    wanted = ["grid", "--folder", str(tmp_path), "--arms", "matched_step", "--seeds", "7", "--steps", "3"]
    assert main(wanted) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "it follows the recorded series of llds_0.5-7" in said
    config = configuration("matched_step", 7, tmp_path)
    assert config["learner"]["match_kl"] == str(tmp_path / "llds_0.5" / "7")


def test_seeds_are_a_range_or_a_list():
    assert numbers("100:103") == [100, 101, 102]
    assert numbers("100,105") == [100, 105]
    for wrong in ("5:5", "x", ""):
        with pytest.raises(ValueError):
            numbers(wrong)


def test_the_page_states_the_design_that_the_code_runs():
    assert YAML(typ="safe", pure=True).load(base_yaml()) == BASE
    for part in (base_yaml(), arms_table(), contrasts_line()):
        assert part in PLAN
    for arm in FAMILIES[2]:  # it announced them, before they could be run
        assert f"- `{arm}`: {ARMS[arm].says}; needs: " in PLAN


def test_the_second_page_states_the_second_family():
    for part in (arms_table(2), contrasts_line(2)):
        assert part in PLAN_SECOND


@pytest.mark.slow
def test_the_page_states_the_simulated_power():
    assert paragraph(len(contrasts())) in " ".join(PLAN.split())


def test_make_study_full_runs_the_plan_and_study_is_as_it_was():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "study: setup\n\t$(PY) -m trainer demo --collapse\n" in makefile
    assert "study-full: setup\n\t$(PY) -m benchmarks.collapse grid" in makefile
    assert "make study-full" in makefile.split(".PHONY")[0]
