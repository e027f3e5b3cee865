"""The collapse study: its arms, and the numbers it prints."""

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from trainer.config.schema import dump_config, load_config, parse_config
from trainer.lab.demo import LabFiles, collapse_config, demo_config
from trainer.lab.show import ARMS, collapse_step, moving_mean

FILES = LabFiles(
    *(Path(n) for n in ("model", "train_corpus", "train_questions", "eval_corpus", "eval_questions"))
)


def leaves(node, key=""):
    if not isinstance(node, dict):
        return {key: node}
    return {
        k: v for name, child in node.items() for k, v in leaves(child, f"{key}.{name}".strip(".")).items()
    }


def test_the_arms_differ_in_llds_lambda_alone(tmp_path):
    written = {}
    for arm, value in ARMS.items():
        raw = collapse_config(FILES, folder=tmp_path, name=f"collapse-0-{arm}", seed=0, llds_lambda=value)
        file = tmp_path / f"{arm}.yaml"
        file.write_text(dump_config(parse_config(raw)))
        assert load_config(file) == parse_config(raw)
        written[arm] = leaves(YAML(typ="safe", pure=True).load(file.read_text()))
    grpo, llds = written["grpo"], written["llds"]
    assert grpo.keys() == llds.keys()
    assert {k for k in grpo if grpo[k] != llds[k]} == {"algorithm.llds.lambda", "run.name"}
    assert (grpo["algorithm.llds.lambda"], llds["algorithm.llds.lambda"]) == (0.0, 0.5)


def test_steps_can_be_given_and_the_demo_has_the_same_world(tmp_path):
    study = parse_config(collapse_config(FILES, folder=tmp_path, name="a", seed=0, llds_lambda=0.5, steps=3))
    shown = parse_config(demo_config(FILES, folder=tmp_path, name="a", seed=0, steps=4))
    assert (study.trainer.steps, shown.trainer.steps) == (3, 4)
    assert (study.learner.optimiser_steps_per_batch, shown.learner.optimiser_steps_per_batch) == (10, 8)
    assert (study.model, study.data, study.retriever) == (shown.model, shown.data, shown.retriever)


def test_moving_mean():
    assert moving_mean([1.0, 2.0, 3.0, 6.0], 3) == pytest.approx([2.0, 11 / 3])
    assert moving_mean([1.0, 2.0], 3) == []


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        ([0.5] * 40, None),
        ([], None),
        ([0.0] * 40, None),
        ([0.5] * 10, None),
        # From step 20 on nothing: the mean of steps 17 to 24 is 3/8, the first under half of 1.
        ([1.0] * 19 + [0.0] * 20, 24),
        # The means are low from step 24 on; 8 of them need the rewards up to step 31.
        ([1.0] * 19 + [0.0] * 12, 24),
        ([1.0] * 19 + [0.0] * 11, None),
        # A short dip that comes back.
        ([1.0] * 19 + [0.0] * 6 + [1.0] * 30, None),
        # Half of the maximum is not under half.
        ([1.0] * 20 + [0.5] * 40, None),
        # A first dip that is too short does not count towards the second one.
        ([1.0] * 20 + [0.0] * 6 + [1.0] * 20 + [0.0] * 20, 51),
    ],
)
def test_collapse_step(rewards, step):
    assert collapse_step(rewards) == step
