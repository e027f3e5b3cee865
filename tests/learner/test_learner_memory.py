"""`learner.gradient_checkpointing: auto`: activations are kept where they fit, and a try that fails leaves
the gradients alone."""

from __future__ import annotations

import pytest
import torch
from learner_world import make_batch, make_config, make_policy, start_rank

from benchmarks.gpu.shapes import qwen2_config
from trainer.learner.model import memory
from trainer.learner.model.policy import PolicyModel, load_policy

STEP = {"llds_lambda": 0.2, "answer_beta": 1.0, "lr_scale": 1.0}
GIB = 2**30


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


# By hand, bytes per token that a layer keeps in bfloat16: both norms their input in float32 and the
# normalised values (12 d), the inputs of the attention's and the MLP's linear maps (4 d), rotated queries,
# keys, values and the kernel's result (4 q + 4 kv), and the gate, its activation, the other half and their
# product (8 f). Here q = d.
SIZES = {  # parameters in billions, bytes per token of all layers by hand
    "0.5b": (0.494, 24 * (20 * 896 + 4 * 128 + 8 * 4864)),
    "1.5b": (1.544, 28 * (20 * 1536 + 4 * 256 + 8 * 8960)),
    "3b": (3.086, 36 * (20 * 2048 + 4 * 256 + 8 * 11008)),
    "7b": (7.616, 28 * (20 * 3584 + 4 * 512 + 8 * 18944)),
}
H100, H200 = 79.2 * GIB, 139.8 * GIB


def big_policy(size="3b"):
    """A shape without its memory."""
    from transformers import Qwen2ForCausalLM

    with torch.device("meta"):
        hf = Qwen2ForCausalLM(qwen2_config(size)).bfloat16()
    policy = PolicyModel.__new__(PolicyModel)
    torch.nn.Module.__init__(policy)
    policy.hf = hf
    policy.chunk_tokens = 1024
    return policy


def plan(size, tokens, device):
    """On a GPU of so many bytes under ZeRO 1: weights, their gradients' sums and master weights are there, 10
    bytes per parameter, and a GiB of the driver's; gradients and Adam's moments, 10 more, are to come."""
    parameters = SIZES[size][0] * 1e9
    free = device - GIB - 10 * parameters
    return memory.plan(big_policy(size), tokens, int(free), int(device), int(10 * parameters))


def test_the_estimate_is_near_what_a_3b_model_was_measured_to_keep():
    # 4,096 tokens without checkpointing: 73.2 GiB at the peak, 54 of them weights, gradients and optimiser.
    measured = (73.2 - 54) * GIB / 4096
    assert 0.9 * measured < memory.activation_bytes(big_policy()) < 1.4 * measured


@pytest.mark.parametrize("size", SIZES)
def test_the_estimate_is_a_little_above_what_a_layer_keeps_by_hand(size):
    parameters, by_hand = SIZES[size]
    policy = big_policy(size)
    assert sum(p.numel() for p in policy.parameters()) / 1e9 == pytest.approx(parameters, rel=0.002)
    assert 1.0 < memory.activation_bytes(policy) / by_hand < 1.3


@pytest.mark.parametrize(
    ("size", "device", "kept", "again"),
    [
        # GiB of room: device, less 1, 20 bytes per parameter, 2 for the head, 8 % of the device.
        ("0.5b", H100, 32768, 65536),  # 61 of room; 52 and 105 needed
        ("1.5b", H100, 8192, 16384),  # 41; 26 and 53
        ("3b", H100, 2048, 4096),  # 12; 11 and 21
        ("0.5b", H200, 65536, 131072),  # 117; 105 and 210
        ("1.5b", H200, 16384, 32768),  # 97; 53 and 106
        ("3b", H200, 8192, 16384),  # 69; 43 and 86
    ],
)
def test_activations_are_kept_as_long_as_they_fit(size, device, kept, again):
    roomy, tight = plan(size, kept, device), plan(size, again, device)
    assert not roomy.checkpointing and tight.checkpointing
    assert roomy.line.startswith(f"learner: activations are kept: {kept} tokens of a micro-batch need ")
    assert tight.line.startswith("learner: activations are computed again in the backward pass: ")
    assert tight.line.endswith("(learner.gradient_checkpointing=auto)") and "\n" not in tight.line


def test_a_7b_model_leaves_no_room_on_one_gpu():
    assert plan("7b", 256, H200).checkpointing


def test_the_rule_is_monotonous_in_tokens():
    fits = [not plan("3b", tokens, H200).checkpointing for tokens in range(0, 40000, 500)]
    assert fits == sorted(fits, reverse=True) and fits[0] and not fits[-1]


def test_where_another_rank_lacks_room_the_line_says_so():
    roomy = plan("0.5b", 1024, H200)
    assert roomy.joined(False) is roomy
    joined = roomy.joined(True)
    assert joined.checkpointing and "computed again" in joined.line and "another rank" in joined.line


@pytest.mark.parametrize(
    ("learner", "before", "after"),
    [
        # Of each parameter: its gradient, the sum of gradients in float32, Adam's moments.
        ({"zero_stage": 1, "dtype": "bfloat16"}, 2 + 0 + 8, 2),  # the sum is there from the start
        ({"zero_stage": 2, "dtype": "bfloat16"}, 2 + 4 + 8, 6),
        ({"zero_stage": 0, "dtype": "float32"}, 4 + 8, 4),
        ({"zero_stage": 2, "dtype": "bfloat16", "offload_optimizer": True}, 2 + 4, 6),
    ],
)
def test_what_is_still_to_come_is_counted_before_and_after_the_first_step(model, learner, before, after):
    rank = start_rank(make_config(model, learner=learner), model)
    parameters = sum(p.numel() for _, p in rank.engine.weights)
    assert rank.engine.due_bytes() == before * parameters
    rank.update(make_batch(8), **STEP)
    assert rank.engine.due_bytes() == after * parameters


def test_on_cpu_nothing_is_decided(model):
    rank = start_rank(make_config(model), model)
    assert (rank.checkpointing, rank.activations, rank.tries_room) == (False, "", False)


def test_a_try_touches_no_gradient_and_memory_that_lacks_is_told(model):
    policy = load_policy(model, dtype=torch.float32, temperature=1.0, chunk_tokens=16)
    ids = torch.arange(12)[None] % 40
    columns = torch.arange(1, 12)

    def forward():
        return policy(ids, torch.zeros_like(columns), columns)[0]

    assert memory.fits(policy, forward, 1000)
    assert all(p.grad is None for p in policy.parameters())

    def lacking():
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert not memory.fits(policy, lacking, 0)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_after_a_failed_try_has_the_bits_of_one_with_checkpointing(model, stage, monkeypatch):
    """The try fails in its backward pass, in the middle of the layers."""
    batch = make_batch(8)
    options = {"zero_stage": stage, "lr": 1e-3}
    asked = start_rank(make_config(model, learner=options | {"gradient_checkpointing": True}), model)
    rank = start_rank(make_config(model, learner=options | {"gradient_checkpointing": "auto"}), model)
    rank.tries_room = True

    def fail(gradient):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def fail_once(_module, _inputs, out):
        if not rank.checkpointing and (out[0] if isinstance(out, tuple) else out).requires_grad:
            (out[0] if isinstance(out, tuple) else out).register_hook(fail)

    rank.engine.policy.hf.base_model.layers[0].register_forward_hook(fail_once)
    expected, made = asked.update(batch, **STEP), rank.update(batch, **STEP)
    assert rank.checkpointing and rank.tokens_tried > 0
    assert [s.grad_norm for s in made.steps] == [s.grad_norm for s in expected.steps]
    want, got = asked.weights(), rank.weights()
    assert all(torch.equal(torch.as_tensor(want[k]), torch.as_tensor(got[k])) for k in want)


def test_a_micro_batch_is_tried_once_and_again_only_where_a_larger_one_comes(model, monkeypatch):
    tried = []
    monkeypatch.setattr(memory, "fits", lambda policy, forward, due: tried.append(forward().numel()) or True)
    options = {"tokens_per_microbatch": 10_000, "gradient_checkpointing": "auto"}
    rank = start_rank(make_config(model, learner=options), model)
    rank.tries_room = True
    for rows in (8, 8, 24):
        rank.update(make_batch(rows), **STEP)
    assert len(tried) == 2 and tried[1] > tried[0]
    assert not rank.checkpointing
