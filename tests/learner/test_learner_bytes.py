"""Bytes per parameter: docs/gpu.md's table and sentences, the key's explanation, and what an engine holds."""

from __future__ import annotations

import pytest
from learner_world import make_batch, make_config, make_policy, start_rank
from page_parts import section
from places import ROOT

from trainer.config.learner import LearnerSettings

PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
STEP = {"llds_lambda": 0.2, "answer_beta": 1.0, "lr_scale": 1.0}
STAGES = ["1", "2", "3", "1, `offload_optimizer`", "2, `offload_optimizer`", "3, `offload_optimizer`"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


def told(stage):
    """Bytes per parameter of one rank: weights, gradients, optimiser."""
    (row,) = [r for r in section(PAGE, "Memory by model size").splitlines() if r.startswith(f"| {stage} |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
    return [sum(int(part.split()[0]) for part in cell.split(", and ")) for cell in cells]


def held(engine):
    """Bytes per parameter that an engine's device holds: weights, and gradients wherever DeepSpeed has them.
    What lies in host memory is in none of these."""
    parameters = [p for _, p in engine.weights]
    inner = engine.engine.optimizer
    averaged = [t for each in (getattr(inner, "averaged_gradients", None) or {}).values() for t in each or ()]
    gradients = [
        *(p.grad for p in parameters),
        *(getattr(p, "grad_accum", None) for p in parameters),
        *(averaged),
        *getattr(inner, "fp32_groups_gradients_flat", ()),
    ]
    weights = [getattr(p, "ds_tensor", p) for p in parameters]
    total = sum(engine._shape(p).numel() for p in parameters)
    return [sum(t.nbytes for t in each if t is not None) / total for each in (weights, gradients)]


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_holds_as_many_bytes_as_the_table_says(model, stage):
    options = {"zero_stage": int(stage[0]), "offload_optimizer": "offload" in stage, "dtype": "bfloat16"}
    rank = start_rank(make_config(model, learner=options), model)
    seen, backward = [], rank.engine.backward

    def counted(loss):
        backward(loss)
        seen.append(held(rank.engine))

    rank.engine.backward = counted
    rank.update(make_batch(8), **STEP)
    assert seen and all(each == told(stage)[:2] for each in seen)


def test_sentences_and_the_key_have_the_sums_of_the_table():
    without, offloaded = ([sum(told(s)) for s in stages] for stages in (STAGES[:3], STAGES[3:]))
    assert without == [20, 18, 18] and offloaded == [6, 6, 2]
    page = " ".join(PAGE.split())
    assert "with ZeRO 1 6 bytes per parameter with `offload_optimizer`, 20 without ([below]" in page
    assert "On one rank that is 20 with ZeRO 1 and 18 with ZeRO 2. `offload_optimizer` leaves 6 with" in page
    key = " ".join(LearnerSettings.model_fields["offload_optimizer"].description.split())
    assert "One rank with zero_stage 1 then takes 6 bytes per parameter on GPU instead of 20." in key
