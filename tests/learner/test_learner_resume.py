"""What goes to disk and comes back: checkpoints, exports, and the gathering of ZeRO-3 weights."""

import contextlib
import json

import numpy as np
import pytest
import torch
from learner_world import make_batch, make_config, make_policy, same_bits, start_rank

from services.common.errors import UserError
from trainer.learner.export import export_checkpoint
from trainer.learner.zero import iter_partitioned

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning"
)  # of torch, at DeepSpeed's collective operations
STEP = {"llds_lambda": 0.2, "answer_beta": 1.0, "lr_scale": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


def update(rank, step):
    scored, steps, extra, _ = rank.update(make_batch(8, seed=step), **STEP)
    untimed = {k: v for k, v in extra.items() if not k.startswith("time/")}
    return scored[1], [(s.sums, s.grad_norm, s.ratio_max) for s in steps], untimed


def assert_same_steps(got, expected):
    assert np.array_equal(got[0], expected[0])
    assert got[1:] == expected[1:]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_a_resumed_learner_takes_the_very_same_steps(model, tmp_path, stage, dtype):
    config = make_config(
        model,
        algorithm={"kl": 0.01, "llds": {"lambda": 0.2, "anchor": "snapshot", "snapshot_every": 3}},
        learner={"zero_stage": stage, "dtype": dtype, "warmup_steps": 10},
    )
    rank = start_rank(config, model, reference=True)
    for step in (1, 2):
        update(rank, step)
    rank.save(str(tmp_path / "c"), {"cursor": [1, 2], "step": 2})
    saved = rank.master()
    expected = [update(rank, step) for step in (3, 4, 5)]

    again = start_rank(config, model, reference=True)
    assert again.load(str(tmp_path / "c")) == {"cursor": [1, 2], "step": 2}
    assert same_bits(again.master(), saved) and again.engine.adam_steps == 8
    for step, wanted in zip((3, 4, 5), expected, strict=True):
        assert_same_steps(update(again, step), wanted)
    assert same_bits(again.master(), rank.master())


@pytest.mark.parametrize("stage", [0, 2])
def test_adapters_with_a_kept_copy_to_compare_with_take_the_very_same_steps_when_resumed(
    model, tmp_path, stage
):
    config = make_config(
        model,
        algorithm={"llds": {"lambda": 0.2, "anchor": "snapshot", "snapshot_every": 3}},
        learner={"lora": {"rank": 4, "alpha": 8}, "lr": 0.02, "zero_stage": stage},
    )
    rank = start_rank(config, model)
    for step in (1, 2):
        update(rank, step)
    rank.save(str(tmp_path / "c"), {})
    again = start_rank(config, model)
    again.load(str(tmp_path / "c"))
    assert same_bits(again.snapshot, rank.snapshot)
    assert_same_steps(update(again, 3), update(rank, 3))


def test_a_learner_resumed_after_a_batch_in_which_nothing_could_act_takes_the_very_same_steps(
    model, tmp_path
):
    rank = start_rank(make_config(model, learner={"warmup_steps": 10}), model)
    update(rank, 1)
    idle = make_batch(8, seed=2)
    idle.advantages[:] = 0
    rank.update(idle, **STEP)
    rank.save(str(tmp_path / "c"), {})
    again = start_rank(make_config(model, learner={"warmup_steps": 10}), model)
    again.load(str(tmp_path / "c"))
    assert again.optimiser_steps == again.engine.adam_steps == 4 and again.batches == 2
    assert_same_steps(update(again, 3), update(rank, 3))


def test_a_checkpoint_before_the_first_step_can_be_resumed(model, tmp_path):
    rank = start_rank(make_config(model), model)
    rank.save(str(tmp_path / "c"), {})
    again = start_rank(make_config(model), model)
    again.load(str(tmp_path / "c"))
    assert_same_steps(update(again, 1), update(rank, 1))


@pytest.mark.slow
def test_a_checkpoint_can_go_on_under_another_zero_stage(model, tmp_path):
    rank = start_rank(make_config(model, learner={"zero_stage": 3}), model)
    update(rank, 1)
    rank.save(str(tmp_path / "c"), {})
    for stage in (0, 1, 2):
        other = start_rank(make_config(model, learner={"zero_stage": stage}), model)
        update(other, 7)  # whatever it was before
        other.load(str(tmp_path / "c"))
        assert same_bits(other.master(), rank.master()) and same_bits(other.weights(), rank.weights())


def test_loading_into_a_used_learner_forgets_its_steps(model, tmp_path):
    fresh = start_rank(make_config(model), model)
    fresh.save(str(tmp_path / "c"), {})
    used = start_rank(make_config(model), model)
    update(used, 3)
    used.load(str(tmp_path / "c"))
    assert_same_steps(update(used, 1), update(fresh, 1))


def test_the_same_seed_gives_the_same_bits(model):
    a, b = (start_rank(make_config(model), model) for _ in range(2))
    for step in (1, 2):
        assert_same_steps(update(a, step), update(b, step))
    assert same_bits(a.master(), b.master())


def test_a_checkpoint_of_another_model_is_refused(model, tmp_path):
    rank = start_rank(make_config(model), model)
    rank.save(str(tmp_path / "c"), {})
    untied = make_policy(tmp_path / "untied", tied=False)
    with pytest.raises(UserError, match=r"no tensor lm_head\.weight"):
        start_rank(make_config(untied), untied).load(str(tmp_path / "c"))
    with pytest.raises(UserError, match="no such folder"):
        rank.load(str(tmp_path / "absent"))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.slow
def test_exports_load_in_transformers_with_the_learners_log_probs(tmp_path, tied, stage):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = make_policy(tmp_path / "model", tied=tied)
    rank = start_rank(make_config(model, learner={"zero_stage": stage}), model)
    update(rank, 1)
    rank.export_hf(str(tmp_path / "hf"))
    rank.export_hf(str(tmp_path / "hf"))  # an earlier export is replaced
    rank.save(str(tmp_path / "c"), {})
    export_checkpoint(tmp_path / "c", tmp_path / "later")

    batch = make_batch(3)
    rows, logp, _ = rank.score(batch)
    for folder in (tmp_path / "hf", tmp_path / "later"):
        hf = AutoModelForCausalLM.from_pretrained(folder)
        assert hf.dtype == torch.float32
        assert (
            AutoTokenizer.from_pretrained(folder).get_vocab()
            == AutoTokenizer.from_pretrained(model).get_vocab()
        )
        at = 0
        for b in rows:
            ids = torch.from_numpy(batch.token_ids[batch.row(b)]).long()
            with torch.no_grad():
                table = hf(input_ids=ids[None]).logits[0].log_softmax(-1)
            got = logp[at : at + len(ids)]
            for t in np.flatnonzero(batch.action_ids[batch.row(b)] >= 0):
                assert abs(float(table[t - 1, ids[t]]) - got[t]) < 1e-5
            at += len(ids)
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (
        tmp_path / "later" / "model.safetensors"
    ).read_bytes()


def test_an_export_of_a_bfloat16_run_says_so(model, tmp_path):
    rank = start_rank(make_config(model, learner={"dtype": "bfloat16"}), model)
    rank.save(str(tmp_path / "c"), {})
    export_checkpoint(tmp_path / "c", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


class PartitionedParameter(torch.nn.Parameter):
    """As a ZeRO-3 parameter looks between uses: no data, its size and shape on the side."""

    def __new__(cls, whole):
        p = super().__new__(cls, torch.empty(0), requires_grad=False)
        p.whole, p.ds_shape, p.ds_numel = whole, whole.shape, whole.numel()
        return p


def test_partitioned_weights_are_gathered_in_buckets_within_the_limit():
    wholes = {f"w{i}": torch.randn(n, 4) for i, n in enumerate([5, 3, 8, 40, 1, 1, 6, 2])}
    params, sizes = [(n, PartitionedParameter(t)) for n, t in wholes.items()], []

    @contextlib.contextmanager
    def gather(bucket):
        sizes.append(sum(p.ds_numel * 4 for p in bucket))
        for p in bucket:
            p.data = p.whole
        yield
        for p in bucket:
            p.data = torch.empty(0)

    got = dict(iter_partitioned(params, 16 * 4 * 4, gather=gather))
    assert list(got) == list(wholes) and all(torch.equal(got[n], wholes[n]) for n in wholes)
    assert sorted(sizes)[-1] == 40 * 16  # the one parameter above the limit went alone
    assert max(s for s in sizes if s != 40 * 16) <= 256 and len(sizes) == 3
    assert all(p.numel() == 0 for _, p in params)


def test_a_weight_that_was_not_gathered_whole_is_refused():
    p = PartitionedParameter(torch.randn(3, 4))
    with pytest.raises(RuntimeError, match=r"weight head: gathered shape \(0,\) is not its shape \(3, 4\)"):
        list(iter_partitioned([("head", p)], 10**6, gather=lambda bucket: contextlib.nullcontext()))
