"""ZeRO stage 2 gains nothing with one rank but 2 bytes a parameter, and costs time."""

import pytest

from tests.places import ROOT
from trainer.commands import init
from trainer.config.learner import LearnerSettings
from trainer.config.schema import load_config

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_with_one_rank_is_at_most_at_stage_1(file):
    learner = load_config(file, []).learner
    assert learner.ranks > 1 or learner.zero_stage <= 1


@pytest.mark.parametrize("gpus", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("billions", [0.5, 1.5, 3, 7, 14])
def test_what_init_writes_for_one_rank_leaves_the_stage_at_its_default(billions, gpus):
    lines = init.fit(int(billions * 1e9), gpus).learner
    if not any(line.startswith("ranks:") for line in lines):
        assert not any(line.startswith("zero_stage:") for line in lines)
    assert LearnerSettings().zero_stage == 1
