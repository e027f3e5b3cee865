"""A step that runs out of memory is taken again with checkpointing, and ends with the bits of a run that had
it from the start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from learner_world import make_batch, make_config, make_policy, same_bits, start_rank
from places import ROOT

from trainer.learner import rank_steps
from trainer.learner.group import joined

STEP = {"llds_lambda": 0.2, "answer_beta": 1.0, "lr_scale": 1.0}
PAIR = Path(__file__).with_name("learner_pair.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


def no_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def once(rank, call, at=1):
    """The call, but its `at`th time without checkpointing there is no memory for it."""
    times = 0

    def calls(*given):
        nonlocal times
        if not rank.checkpointing:
            times += 1
            if times == at:
                no_memory()
        return call(*given)

    return calls


def in_forward(rank):
    hook = once(rank, lambda _module, _inputs, _out: None, at=2)
    rank.engine.policy.hf.base_model.layers[1].register_forward_hook(
        lambda *given: hook(*given) if torch.is_grad_enabled() else None
    )


def in_backward(rank):
    """In the second micro-batch, between the layers: those behind have their gradients by then."""
    hook = once(rank, lambda gradient: None, at=2)

    def watch(_module, _inputs, out):
        hidden = out[0] if isinstance(out, tuple) else out
        if hidden.requires_grad:
            hidden.register_hook(hook)

    rank.engine.policy.hf.base_model.layers[0].register_forward_hook(watch)


def in_optimiser(rank):
    basic = rank.engine.engine.basic_optimizer
    basic.step = once(rank, basic.step)


PHASES = {"forward": in_forward, "backward": in_backward, "optimiser": in_optimiser}


def taken(rank, batches):
    """Norms of all steps of some batches."""
    return [step.grad_norm for batch in batches for step in rank.update(batch, **STEP).steps]


BFLOAT16 = {"zero_stage": 1, "dtype": "bfloat16"}
CASES = [
    ("forward", {"zero_stage": 1}),
    *(("backward", {"zero_stage": stage}) for stage in (0, 1, 2)),
    *(("optimiser", {"zero_stage": stage}) for stage in (0, 1, 2)),
    ("backward", BFLOAT16),
    ("optimiser", BFLOAT16),
    ("backward", {"zero_stage": 2, "dtype": "bfloat16", "packing": "packed"}),
    ("backward", {"zero_stage": 2, "offload_optimizer": True}),
]


@pytest.mark.parametrize(("phase", "learner"), CASES)
def test_a_step_that_ran_out_of_memory_is_taken_again_with_the_same_bits(model, phase, learner, caplog):
    options = {"tokens_per_microbatch": 40, "lr": 1e-2} | learner
    batches = [make_batch(8), make_batch(8, seed=1)]
    asked = start_rank(make_config(model, learner=options | {"gradient_checkpointing": True}), model)
    rank = start_rank(make_config(model, learner=options), model)
    PHASES[phase](rank)
    assert not rank.checkpointing
    made, drawn = taken(rank, batches), torch.get_rng_state()
    assert made == taken(asked, batches)
    assert rank.checkpointing and same_bits(rank.master(), asked.master())
    assert same_bits(rank.weights(), asked.weights())
    assert torch.equal(drawn, torch.get_rng_state())
    lines = [r.getMessage() for r in caplog.records if "memory ran out" in r.getMessage()]
    assert len(lines) == 1 and "taken again" in lines[0] and "\n" not in lines[0]


def test_what_ran_out_is_told_with_the_result_once(model):
    """A rank's own log is read by nobody: the run says it."""
    config = make_config(model, learner={"tokens_per_microbatch": 40})
    rank = start_rank(config, model)
    in_backward(rank)
    batches = [make_batch(8), make_batch(8, seed=1)]
    results = [rank.update(batch, **STEP) for batch in batches]
    told = [
        joined(batch, [result], config.algorithm, 0.2, 1.0).told
        for batch, result in zip(batches, results, strict=True)
    ]
    assert [len(lines) for lines in told] == [1, 0]
    assert told[0][0].startswith("memory ran out in an optimiser step, which was taken again; from now on ")


def test_a_demonstration_step_is_taken_again_too(model):
    demos = [make_batch(6, seed=5)]
    asked, rank = (
        start_rank(
            make_config(model, learner={"gradient_checkpointing": on, "tokens_per_microbatch": 40}), model
        )
        for on in (True, False)
    )
    in_backward(rank)
    told = [r._supervise(demos, 1.0) for r in (asked, rank)]
    assert told[0] == told[1] and rank.checkpointing
    assert same_bits(rank.master(), asked.master())


def test_demonstrations_are_tried_for_room_before_their_step(model, monkeypatch):
    tried = []
    monkeypatch.setattr(
        rank_steps.memory, "fits", lambda policy, forward, due: tried.append(forward().numel()) or False
    )
    rank = start_rank(make_config(model, learner={"gradient_checkpointing": "auto"}), model)
    rank.tries_room = True
    rank._supervise([make_batch(6)], 1.0)
    assert len(tried) == 1 and rank.checkpointing


def test_memory_that_lacks_with_checkpointing_too_is_told(model):
    rank = start_rank(make_config(model, learner={"gradient_checkpointing": True}), model)
    rank.engine.policy.hf.base_model.layers[1].register_forward_hook(
        lambda *_: no_memory() if torch.is_grad_enabled() else None
    )
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        rank.update(make_batch(8), **STEP)


@pytest.mark.parametrize("stage", [0, 1])
def test_weights_that_were_changed_already_are_never_changed_twice(model, stage):
    rank = start_rank(make_config(model, learner={"zero_stage": stage}), model)
    basic = rank.engine.engine.basic_optimizer
    plain = basic.step

    def step(*given):
        plain(*given)
        no_memory()

    basic.step = step
    with pytest.raises(Exception, match="cannot be repeated"):
        rank.update(make_batch(8), **STEP)


@pytest.mark.slow
def test_two_ranks_take_the_step_again_together(model, tmp_path):
    """Where one of them runs out of memory in a backward pass, under each ZeRO stage."""
    port = tmp_path / "port"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PAIR), str(rank), str(model), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        for rank in range(2)
    ]
    try:
        ended = [rank.communicate(timeout=500) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], ended[0][1] + ended[1][1]
    same = ["stage 0 same", "stage 1 same", "stage 2 same", "stage 2 in small buckets same"]
    assert [out.splitlines() for out, _ in ended] == [same, same]
