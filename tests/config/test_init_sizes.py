"""What `init` writes for a size of model and a number of cards fits the bytes of docs/gpu.md."""

from __future__ import annotations

import pytest
from ruamel.yaml import YAML

from tests.places import ROOT
from trainer.commands import init
from trainer.config.schema import parse_config

SIZES = [0.13, 0.5, 1.5, 3.09, 4.0, 7.6, 14.8, 32.8, 72.7]


def written(billions, gpus):
    text = init.text_of(
        int(billions * 1e9), gpus, model="m", data="q.jsonl", held_out=None, source="corpus: c"
    )
    return text, parse_config(YAML(typ="safe").load(text))


@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("billions", SIZES)
def test_a_rank_has_room_for_what_it_holds(billions, gpus):
    text, config = written(billions, gpus)
    learner = config.learner
    if learner.lora:
        assert gpus < 2 * init.ranks_needed(int(billions * 1e9)) or gpus == 1
        assert ("its weights alone are" in text) == (2 * billions > 64)
        return
    per_rank = 18 / learner.ranks if learner.zero_stage == 3 else 6 if learner.offload_optimizer else 20
    assert per_rank * billions <= (48 if learner.zero_stage == 3 else 64)
    assert learner.ranks == 1 or 2 * learner.ranks <= gpus, "as many cards are left for the workers"


@pytest.mark.parametrize(
    ("billions", "gpus", "ranks", "stage", "prompts"),
    [
        (0.13, 8, 2, 1, 32), (3.09, 4, 1, 1, 16), (3.09, 16, 4, 1, 64), (4.0, 4, 2, 3, 16),
        (7.6, 8, 4, 3, 32), (14.8, 16, 8, 3, 64), (32.8, 32, 16, 3, 128),
    ],
)  # fmt: skip
def test_ranks_and_batch_follow_size_and_cards(billions, gpus, ranks, stage, prompts):
    _, config = written(billions, gpus)
    found = (config.learner.ranks, config.learner.zero_stage, config.rollout.prompts_per_step)
    assert found == (ranks, stage, prompts) and not config.learner.lora


@pytest.mark.parametrize(
    ("billions", "gpus", "needed"), [(4.0, 2, 4), (7.6, 4, 8), (14.8, 8, 16), (14.8, 1, 16)]
)
def test_too_few_cards_for_all_weights_are_told_with_how_many_it_takes(billions, gpus, needed):
    text, config = written(billions, gpus)
    assert config.learner.lora and f"need {needed} GPUs of 80 GB" in text


def test_the_page_has_the_bytes_that_are_counted_with():
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    assert "On one rank that is 20 with ZeRO 1" in page and "`offload_optimizer` leaves 6 with either" in page
    assert "hold 18 bytes per parameter in 48 GB each" in page
