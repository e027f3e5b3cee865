"""The learner as Ray actors: several ranks, failures that are named, no process left."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import ray
from learner_actors import ElsewhereActor, FailingActor
from learner_world import (
    TestableRank,
    given_old,
    make_batch,
    make_config,
    make_policy,
    relative_difference,
    same_bits,
    start_rank,
)
from places import PYTHONPATH

from services.common.errors import UserError
from trainer.learner.group import LearnerError, LearnerGroup, gathered
from trainer.learner.rank import LearnerRank
from trainer.learner.rank_handle import Pending, RankActor

pytestmark = [pytest.mark.ray, pytest.mark.timeout(500), pytest.mark.filterwarnings("ignore::FutureWarning")]
PROBE = {"betas": (0.0, 0.999), "grad_clip": 1e9}


class ReusableActor(TestableRank, RankActor):
    """A rank that can start anew in its process: what is imported and joined stays."""

    def __init__(self, config, **options):
        self.options = options
        super().__init__(config, **options)

    def renew(self, config, model, reference):
        store = self.store
        options = self.options | {"model_path": str(model), "reference": reference}
        LearnerRank.__init__(self, config, **options)
        self.store = store
        self.setup("", 0)


class ReusableGroup(LearnerGroup):
    actor_class = ReusableActor

    def renew(self, config, reference=False):
        self.config = config
        self.ask("renew", config, self.model_path, reference)
        return self

    def ask(self, method, *args):
        """A call of the tests' own on every rank."""
        calls = [(h.rank, getattr(h.actor, method).remote(*args)) for h in self._running()]
        return self._results([Pending(ref, rank, method) for rank, ref in calls])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    stale = cache / "torch_extensions" / "deepspeed_shm_comm" / "lock"
    stale.parent.mkdir(parents=True)
    stale.touch()  # left by a build that was killed; PyTorch waits for such a file for ever
    paths = os.pathsep.join([PYTHONPATH, os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNSPIRAL_CACHE", str(cache))
        ray.init(
            address="local",
            num_cpus=8,
            resources={"learner": 4},
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": paths}},
        )
        yield cache
        ray.shutdown()


@pytest.fixture(scope="module")
def pair(cluster, model):
    """Two ranks."""
    group = ReusableGroup(make_config(model, learner={"ranks": 2}), model_path=str(model))
    group.start()
    yield group
    group.close()


def config_of(model, ranks, **learner):
    return make_config(
        model,
        algorithm={"kl": 0.01, "entropy": 0.01, "llds": {"lambda": 0.5}},
        learner={"ranks": ranks, **learner},
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 48, 10**6])
def test_two_ranks_give_the_gradient_of_one(pair, model, stage, tokens):
    batch = given_old(make_batch(7))  # an odd number: the ranks' shares differ
    pair.renew(config_of(model, 2, zero_stage=stage, tokens_per_microbatch=tokens, **PROBE), reference=True)
    two = pair.ask("gradient", batch, 0.5)
    one = start_rank(config_of(model, 1, **PROBE), model, reference=True).gradient(batch, 0.5)
    assert same_bits(two[0], two[1])
    assert relative_difference(two[0], one) < 1e-5


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_end_with_the_weights_and_metrics_of_one(pair, model, stage):
    batch = make_batch(9)
    pair.renew(make_config(model, learner={"ranks": 2, "zero_stage": stage, "lr": 1e-4}))
    two = pair.update(batch, llds_lambda=0.2)
    alone = start_rank(make_config(model, learner={"lr": 1e-4}), model)
    alone.update(batch, llds_lambda=0.2, answer_beta=1.0, lr_scale=1.0)
    weights = pair.ask("weights")
    assert same_bits(weights[0], weights[1])
    assert relative_difference(weights[0], alone.weights()) < 1e-6

    scored, steps, *_ = start_rank(make_config(model, learner={"lr": 1e-4}), model).update(
        batch, llds_lambda=0.2, answer_beta=1.0, lr_scale=1.0
    )
    old = gathered(batch, [scored])
    assert np.abs(two.logp_old - old.logp).max() < 1e-5
    assert np.abs(two.entropy_old - old.entropy).max() < 1e-5
    assert two.metrics["grad_norm"] == pytest.approx(np.mean([s.grad_norm for s in steps]), rel=1e-3)
    assert two.metrics["llds/active_tokens"] == sum(s.sums["llds/active_tokens"] for s in steps)
    assert two.metrics["learner/optimiser_steps"] == 4 and two.skipped_steps == 0
    assert two.metrics["learner/tokens"] == 2 * len(batch.token_ids)
    assert two.metrics["learner/action_tokens"] == 2 * (batch.action_ids >= 0).sum()


@pytest.mark.parametrize(
    "algorithm", [{"loss": "kl_cov", "cov_share": 0.1}, {"llds": {"lambda": 0.2, "gate": "random"}}]
)
def test_what_is_chosen_or_drawn_does_not_depend_on_the_ranks(pair, model, algorithm):
    batch, demonstrations = make_batch(9), [make_batch(1, seed=7)]  # fewer demonstrations than ranks
    pair.renew(make_config(model, algorithm=algorithm, learner={"ranks": 2, "lr": 1e-4}))
    two = pair.update(batch, llds_lambda=0.2, supervised=demonstrations)
    alone = start_rank(make_config(model, algorithm=algorithm, learner={"lr": 1e-4}), model)
    update = {"llds_lambda": 0.2, "answer_beta": 1.0, "lr_scale": 1.0, "supervised": demonstrations}
    _, _, facts, _ = alone.update(batch, **update)
    weights = pair.ask("weights")
    assert same_bits(weights[0], weights[1])
    assert relative_difference(weights[0], alone.weights()) < 1e-6
    assert two.metrics["supervised/loss"] == pytest.approx(facts["supervised/loss"], rel=1e-5)
    assert two.metrics["supervised/steps"] == 1 and two.moved


def test_the_entropy_is_over_action_tokens_of_valid_rows(pair, model):
    pair.renew(make_config(model, learner={"ranks": 2}))
    batch = make_batch(6)
    scores = pair.score(batch)
    batch.valid[1] = False
    metrics = pair.update(batch, llds_lambda=0.2).metrics
    mask = (batch.action_ids >= 0) & (np.arange(len(batch.token_ids)) >= batch.row(1).stop) | (
        (batch.action_ids >= 0) & (np.arange(len(batch.token_ids)) < batch.row(0).stop)
    )
    assert metrics["entropy"] == pytest.approx(scores.entropy[mask].mean(), abs=1e-5)


def test_two_ranks_score_each_row_once_also_when_there_are_fewer_rows_than_ranks(pair, model):
    pair.renew(make_config(model, learner={"ranks": 2, "zero_stage": 3}))
    for rows in (1, 5):
        batch = make_batch(rows, group=0)
        alone = start_rank(make_config(model), model)
        logp = gathered(batch, [alone.score(batch)]).logp
        assert np.abs(pair.score(batch).logp - logp).max() < 1e-5


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_both(pair, model):
    for stage in (0, 1, 3):
        pair.renew(
            make_config(
                model, learner={"ranks": 2, "zero_stage": stage, "minibatches_per_batch": 1, "epochs": 2}
            )
        )
        before = pair.ask("weights")[0]
        batch = make_batch(8)
        batch.advantages[2] = np.nan
        result = pair.update(batch, llds_lambda=0.2)
        assert result.skipped_steps == 2 and result.metrics["learner/skipped"] == 2
        assert all(same_bits(w, before) for w in pair.ask("weights"))


def test_checkpoints_pass_between_one_rank_and_two(pair, model, tmp_path):
    snapshot = {"llds": {"lambda": 0.2, "anchor": "snapshot", "snapshot_every": 5}}
    pair.renew(make_config(model, algorithm=snapshot, learner={"ranks": 2, "zero_stage": 3}))
    pair.update(make_batch(8, seed=1), llds_lambda=0.2)
    pair.save(tmp_path / "c", {"step": 1})
    saved, kept = pair.ask("master")[0], pair.ask("weights")[0]

    alone = start_rank(make_config(model, algorithm=snapshot), model)
    assert alone.load(str(tmp_path / "c")) == {"step": 1}
    assert same_bits(alone.master(), saved)
    batch = make_batch(8, seed=2)
    batch.preserved[:] = True
    _, steps, *_ = alone.update(batch, llds_lambda=0.2, answer_beta=1.0, lr_scale=1.0)
    active = steps[0].sums["llds/active_tokens"]
    assert active > 0  # against the snapshot, which is older than this batch
    for stage in (1, 3):
        pair.renew(make_config(model, algorithm=snapshot, learner={"ranks": 2, "zero_stage": stage}))
        assert pair.load(tmp_path / "c") == {"step": 1}
        assert same_bits(pair.ask("master")[0], saved) and same_bits(pair.ask("weights")[1], kept)
        assert pair.update(batch, llds_lambda=0.2).metrics["llds/active_tokens_step_0"] == active

    pair.export_hf(tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").is_file()


@pytest.mark.parametrize("stage", [1, 3])
def test_published_weights_are_the_learners_and_a_transport_that_fails_leaves_no_rank_waiting(
    pair, model, stage
):
    from safetensors.torch import load

    pair.renew(make_config(model, learner={"ranks": 2, "zero_stage": stage}, weight_sync={"bucket_mib": 1}))
    pair.update(make_batch(8), llds_lambda=0.2)
    pair.ask("break_publisher")
    with pytest.raises(
        LearnerError, match=r"learner rank 0 of 2: offer failed: ConnectionError: the workers are gone"
    ):
        pair.offer_weights(3, [])
    pair.ask("mend_publisher")
    update = pair.offer_weights(4, [])
    assert update.version == 4 and update.backend == "shared_memory"
    got = {}
    for bucket in update.payload:
        got |= load(ray.get(bucket.ref, timeout=60).tobytes())
    assert same_bits(got, pair.ask("weights")[1])


def test_starting_compiles_nothing_and_does_not_wait_for_a_stale_build_lock(pair, cluster):
    assert [f.name for f in (cluster / "torch_extensions").rglob("*") if f.is_file()] == ["lock"]


def test_an_error_of_the_users_arrives_as_such(cluster, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="has no weights") as e:
        LearnerGroup(make_config(tmp_path), model_path=str(tmp_path)).start()
    assert e.value.exit_code == 2


def test_a_rank_on_a_host_without_the_model_is_the_users_mistake_and_named(cluster, model):
    group = LearnerGroup(make_config(model, learner={"ranks": 2}), model_path=str(model))
    group.actor_class = ElsewhereActor
    with pytest.raises(
        UserError, match=r"^learner rank 1 on \S+: model.path: /nowhere/model is not a folder"
    ) as e:
        group.start()
    assert e.value.exit_code == 2


def test_a_rank_whose_start_fails_is_named_within_seconds(cluster, model):
    group = LearnerGroup(make_config(model, learner={"ranks": 2}), model_path=str(model))
    group.actor_class = FailingActor
    began = time.monotonic()
    with pytest.raises(LearnerError, match=r"learner rank 1 of 2.*OSError: no such device"):
        group.start()
    assert time.monotonic() - began < 150


def test_a_rank_that_does_not_answer_is_named_after_the_timeout(pair, model):
    pair.renew(make_config(model, learner={"ranks": 2, "step_timeout_seconds": 2}))
    with pytest.raises(LearnerError, match=r"learner rank 1 of 2 did not nap within 2 s"):
        pair.ask("nap", 6)
    pair.renew(make_config(model, learner={"ranks": 2}))


def test_more_ranks_than_the_cluster_holds_are_refused_with_demand_and_supply(cluster, model):
    group = LearnerGroup(make_config(model, learner={"ranks": 99}), model_path=str(model))
    with pytest.raises(
        LearnerError,
        match=r"learner\.ranks=99 asks for 99 CPU, 99 learner; the cluster has 8 CPU, 4 learner",
    ) as e:
        group.start()
    assert e.value.exit_code == 3


def test_ranks_that_find_no_free_place_are_named_after_the_timeout(pair, model):
    group = LearnerGroup(
        make_config(model, learner={"ranks": 3, "start_timeout_seconds": 5}), model_path=str(model)
    )
    with pytest.raises(
        LearnerError, match=r"found no place within 5 s: it asks for 1 learner, of which 0 is free"
    ):
        group.start()


def test_a_stopped_learner_says_so(model):
    with pytest.raises(LearnerError, match="not running"):
        LearnerGroup(make_config(model), model_path=str(model)).score(make_batch(1, group=0))
    with pytest.raises(ValueError, match="needs the reference model"):
        LearnerGroup(make_config(model, algorithm={"kl": 0.1}), model_path=str(model))


def test_a_rank_killed_in_an_update_fails_the_call_and_close_leaves_no_process(pair, model):
    """Last in this file: it ends the pair."""
    pair.renew(make_config(model, learner={"ranks": 2}))
    pids = [w.pid for w in pair.where]
    os.kill(pids[1], signal.SIGSTOP)  # rank 0 will wait for it in a collective operation
    batch = ray.put(make_batch(8))
    pending = [h.update(batch, llds_lambda=0.2, answer_beta=1.0, lr_scale=1.0) for h in pair._handles]
    time.sleep(0.5)
    os.kill(pids[1], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(LearnerError, match=r"learner rank [01] of 2"):
        pair._results(pending, 60)
    pair.close()
    assert time.monotonic() - began < 100
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
