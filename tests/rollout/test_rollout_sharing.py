"""Learner and workers on the same GPUs in turns: who may compute when, and what is refused."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
from bare_start import bare_start
from end_to_end import command, configuration, events, finish, metrics
from rollout_fakes import ScriptedWorker
from rollout_models import tiny_model
from scripted_pool import pool_of, until
from test_trainer_monitor_actions import system

from services.common.errors import EnvironmentLacks, UnspiralError, UserError
from services.contracts import WeightUpdate, WorkerInfo
from services.rollout.engines.base import GenerateCall
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.pool import placement
from services.rollout.pool.shares import rank_share
from services.settings import RolloutSettings, WeightSyncSettings
from services.weight_sync import WeightsGoneError
from trainer.config.schema import parse_config
from trainer.loop.driver import Driver
from trainer.session.run_services import Services
from trainer.session.stopping import StopSignals

SHARED = {"rollout": {"share_gpus": True, "prompts_per_step": 2, "group_size": 2}}
CALL = {"max_tokens": 2, "temperature": 1.0, "seed": 1, "stop": ()}


def raw(**sections):
    return {"model": {"path": "m"}, "data": {"train": "t"}, "retriever": {"url": "http://x"}} | sections


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {"rollout": {"share_gpus": True, "max_staleness": 1}},
            "needs rollout.max_staleness=0 and rollout.tensor_parallel=1",
        ),
        ({"rollout": {"share_gpus": True, "workers": "all"}}, "needs a number of rollout.workers"),
        ({"rollout": {"share_gpus": True}, "learner": {"ranks": 2}}, "at least learner.ranks=2"),
    ],
)
def test_what_does_not_go_with_turns_is_refused_in_one_line(sections, line):
    with pytest.raises(UserError, match=line):
        parse_config(raw(**sections))


@pytest.mark.parametrize(
    ("settings", "ranks", "gpus", "line"),
    [
        (
            {},
            1,
            1,
            r"need 2 GPUs, one for each; the cluster has 1. Ask for fewer, or set rollout.share_gpus=true",
        ),
        ({"workers": 3}, 2, 4, r"learner.ranks=2 and rollout.workers=3 .*need 5 GPUs"),
        ({"workers": "all", "tensor_parallel": 2}, 3, 4, r"need 5 GPUs"),
        ({"workers": 3, "share_gpus": True}, 1, 2, r"needs 3 GPUs; the cluster has 2"),
    ],
)
def test_too_few_gpus_are_said_before_anything_starts(settings, ranks, gpus, line):
    with pytest.raises(EnvironmentLacks, match=line):
        placement.check_gpus(RolloutSettings(**settings), ranks, {"CPU": 8.0, "GPU": float(gpus)})


def test_a_variable_that_puts_everything_on_the_first_gpu_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    placement.check_gpus(RolloutSettings(), 1, {"CPU": 8.0})
    with pytest.raises(EnvironmentLacks, match="NOSET_CUDA_VISIBLE_DEVICES is set: every worker"):
        placement.check_gpus(RolloutSettings(), 1, {"CPU": 8.0, "GPU": 2.0})


def test_gpus_are_divided_between_learner_and_workers():
    four = {"CPU": 8.0, "GPU": 4.0}
    placement.check_gpus(RolloutSettings(workers=3), 1, four)
    placement.check_gpus(RolloutSettings(workers=4, share_gpus=True), 4, four)
    placement.check_gpus(RolloutSettings(workers=9), 9, {"CPU": 8.0})  # no GPUs: nothing to divide
    assert placement.count(RolloutSettings(workers="all"), four, learner_gpus=1) == 3
    assert placement.count(RolloutSettings(workers="all", tensor_parallel=2), four, learner_gpus=2) == 1
    assert placement.demand(RolloutSettings(), four) == {"GPU": 1}
    shared = placement.demand(RolloutSettings(share_gpus=True), four)["GPU"]
    assert (
        2 * shared > 1 and shared + rank_share(RolloutSettings(share_gpus=True)) == 1
    )  # a rank fits beside a worker, a second worker does not


async def test_an_engine_that_sleeps_refuses_work_until_it_wakes(tmp_path):
    tiny_model(tmp_path)
    engine = await TransformersEngine.start(str(tmp_path), RolloutSettings(engine="transformers"), 0)
    await engine.sleep()
    with pytest.raises(UnspiralError, match="the learner's turn"):
        await engine.generate(GenerateCall("a", [1, 2], **CALL))
    await engine.wake()
    assert len((await engine.generate(GenerateCall("b", [1, 2], **CALL))).token_ids) == 2
    await engine.close()


def workers_answer(monkeypatch, does):
    """Workers that the pool starts are answered for by `does(method, *args)`; there is room for each. Returns
    those that it started."""
    started = []

    def create_worker(*arguments):
        started.append(ScriptedWorker(does))
        return started[-1]

    async def reserve(settings):
        return SimpleNamespace(bundle_specs=[{"GPU": 0.5}])

    monkeypatch.setattr(placement, "reserve", reserve)
    monkeypatch.setattr(placement, "create_worker", create_worker)
    return started


async def test_in_the_learners_turn_no_engine_starts_and_one_that_was_starting_sleeps_too(monkeypatch):
    """They share GPUs: what starts beside the learner takes memory that is not there."""
    up, calls = asyncio.Event(), []

    async def does(method, *args):
        calls.append(method)
        if method == "start":
            await up.wait()
        return WorkerInfo("w", 1, "here", 0, state="ready")

    workers_answer(monkeypatch, does)
    pool = pool_of(target=2)
    book = pool._membership
    pool._roster.target = 1
    book._fill()
    await until(lambda: "start" in calls)
    learners_turn = asyncio.create_task(pool.sleep())
    await asyncio.sleep(0.05)
    assert not learners_turn.done(), "its memory is in use"
    pool._roster.target = 2
    book._fill()
    up.set()
    await asyncio.wait_for(learners_turn, 60)
    await asyncio.sleep(0.05)
    assert calls == ["info", "start", "sleep"], "the second one waits for its turn"
    await pool.wake()
    await until(lambda: len(pool._roster.all()) == 2)
    assert calls == ["info", "start", "sleep", "wake", "info", "start"]


@pytest.mark.parametrize("fails", [False, True], ids=["prepared", "refused"])
async def test_learner_ranks_are_placed_after_every_worker_has_its_share_of_a_gpu(monkeypatch, fails):
    """Ray puts shares where they fit best: two ranks placed before the workers get one GPU together."""
    told = []

    async def does(method, *args):
        return WorkerInfo("w", 1, "here", 0, state="ready")

    class Ranks:
        where = (SimpleNamespace(activations=""),)

        def prepare(self):
            told.append("ranks")
            if fails:
                raise UserError("no such model")

        def start(self):
            told.append("started")

        def demand(self):
            return {"GPU": 0.4}

        def close(self):
            pass

    async def start_services(config, stack, say, *, records):
        return Services("http://x", None, SimpleNamespace())

    workers_answer(monkeypatch, does)
    slow = iter((0.0, 0.3))

    async def reserve(settings):
        await asyncio.sleep(next(slow))
        told.append("room")
        return SimpleNamespace(bundle_specs=[{"GPU": 0.6}])

    monkeypatch.setattr(placement, "reserve", reserve)
    pool = pool_of(workers=2)
    start_system = bare_start(
        monkeypatch,
        resources={"CPU": 8.0, "GPU": 2.0},
        learner=Ranks(),
        start_services=start_services,
        pool=pool,
    )
    config = parse_config(raw(rollout={"share_gpus": True, "workers": 2}, learner={"ranks": 2}))
    with pytest.raises(UserError, match="no such model") if fails else contextlib.nullcontext():
        async with start_system(config, told.append):
            assert not fails
    heard = [text for text in told if text in ("room", "ranks", "started")]
    assert heard == ["room", "room", "ranks"] + ([] if fails else ["started"])
    assert pool.workers() == []


async def test_an_engine_that_does_not_get_up_does_not_keep_the_learner_waiting(monkeypatch):
    async def hangs(method, *args):
        await asyncio.sleep(600)

    started = workers_answer(monkeypatch, hangs)
    book = pool_of(target=1)._membership
    book._fill()
    await until(lambda: started and started[0].calls)
    await asyncio.wait_for(book._turns.give_to_learner(timeout_seconds=0.1), 60)
    assert started[0].killed


@pytest.mark.parametrize("gone", [True, False], ids=["weights gone", "sync announced"])
async def test_a_lost_learner_does_not_wait_for_a_worker_that_waits_for_it(monkeypatch, gone):
    """The worker needs weights that the learner's successor sends, and the successor starts in the learner's
    turn."""
    calls, lost = [], gone

    async def does(method, *args):
        calls.append(method)
        if method == "update_weights" and lost:
            raise WeightsGoneError("the object store has them no more")
        return args[0].version if method == "update_weights" else WorkerInfo("w", 1, "here", 0, state="ready")

    workers_answer(monkeypatch, does)
    pool = pool_of(target=1)
    book = pool._membership
    pool._delivery._settings = WeightSyncSettings(timeout_seconds=300)
    pool._delivery.update, pool._roster.version = WeightUpdate(1, "shared_memory", (), 0), 1
    if not gone:
        await pool.receivers(2)  # and the learner is lost before it sends
    book._fill()
    await until(lambda: pool._roster.waiting if gone else "start" in calls)
    await asyncio.wait_for(pool.sleep(), 60)  # not 300 s
    assert calls == ["info", "start", "update_weights"] + ([] if gone else ["sleep"])
    await asyncio.sleep(0)
    book._fill()
    await pool.wake()
    lost = False
    await pool.sync(WeightUpdate(2, "shared_memory", (), 0))
    await until(lambda: [m.version for m in pool._roster.serving()] == [2])
    assert not [e for e in pool.events if e["event"] == "worker_start_failed"]


class Traced:
    """Learner and pool at once: writes down who was called."""

    where = ()

    def __init__(self):
        self.trace = []

    def update(self, tokens, **options):
        self.trace.append("update")
        return SimpleNamespace(
            logp_old=np.zeros(0), entropy_old=np.zeros(0), metrics={}, moved=True, idle=False
        )

    def score(self, batch):
        self.trace.append("score")
        return SimpleNamespace(logp=np.zeros(0))

    def offer_weights(self, version, receivers):
        self.trace.append("publish")
        return WeightUpdate(version, "none", None, 8)

    def send_weights(self):
        """shared_memory: the offer holds all."""

    async def receivers(self, version):
        return []

    wants_weights = False

    def free_cached_gpu_memory(self):
        self.trace.append("free")

    def load(self, path):
        self.trace.append("load")

    async def sleep(self):
        self.trace.append("sleep")

    async def wake(self):
        self.trace.append("wake")

    async def sync(self, update):
        self.trace.append("sync")


class OneStep(Driver):
    """The real step; what lies between learner and pool is left out."""

    def __init__(self, made, traced):
        made.learner, made.pool, made.tokenizer = traced, traced, None
        progress = SimpleNamespace(stage=lambda *a: None, say=lambda text: None, trajectory=None)
        super().__init__(made, progress, StopSignals(progress.say))
        self.traced = traced

    async def next_batch(self, step):
        self.traced.trace.append("rollout")
        return SimpleNamespace(mean_searches=0.0, cursor={}, trajectories=[])

    async def rescore(self, tokens, moved):
        await self.on_learner(self.system.learner.score, None)
        return None, 0.0

    async def record(self, result):
        assert result.step == 1 and result.version == 1


@pytest.mark.parametrize("share", [False, True])
def test_the_order_of_turns_in_a_step(tmp_path, share, monkeypatch):
    monkeypatch.setattr(
        "trainer.loop.driver.prepare", lambda *a: SimpleNamespace(tokens=SimpleNamespace(logp_old=None))
    )
    monkeypatch.setattr("trainer.loop.driver.scored_step", lambda *a: None)
    driver = OneStep(system(tmp_path, **({"rollout": SHARED["rollout"]} if share else {})), Traced())
    asyncio.run(driver.one_step(1))
    if share:
        assert driver.traced.trace == [
            "rollout",
            "sleep",
            "update",
            "score",
            "publish",
            "free",
            "wake",
            "sync",
        ]
    else:
        assert driver.traced.trace == ["rollout", "update", "publish", "sync", "score"]
    assert driver.sync_bytes == 8


@pytest.mark.ray
@pytest.mark.parametrize("each", [1, 2], ids=["one worker", "two together"])
def test_a_run_in_turns_trains_and_ends_like_any_other(files, tmp_path, each):
    """On CPU engines give nothing free, but refuse work out of turn, so a wrong order fails here too."""
    sections = {
        "rollout": {
            "share_gpus": True,
            "engine": "transformers",
            "workers_per_gpu": each,
            "workers": each,
        },
        "trainer": {"steps": 3, "eval_at_ends": True},
    }
    config = configuration(files, tmp_path, "turns", **sections)
    room = {"RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 1 + each})}
    code, out = finish(command("train", "--config", config, environment=room))
    assert code == 0, out
    run = tmp_path / "turns"
    assert [m["step"] for m in metrics(run)] == [1, 2, 3]
    assert len(events(run, "worker_join")) == each
    assert not events(run, "trajectory_retry") and not events(run, "worker_lost")
    summary = json.loads((run / "summary.json").read_text())
    parts = [summary["performance"][f"share/{p}"] for p in ("rollout", "update", "logprob", "sync", "other")]
    assert sum(parts) == pytest.approx(1.0, abs=1e-6) and summary["performance"]["sync/bytes"] > 1e5
    assert "where the time went" in out
    for tag in ("before", "after"):
        assert len((run / "trajectories" / f"eval_{tag}_greedy.jsonl").read_text().splitlines()) == 8


def test_two_ranks_on_one_gpu_are_named():
    from trainer.learner.group import LearnerError, LearnerGroup
    from trainer.learner.results import RankInfo

    def at(host, uuid):
        return RankInfo(1, host, "cuda:0", "NVIDIA H200", uuid, "bfloat16", False, 10, 5)

    group = LearnerGroup(parse_config(raw(learner={"ranks": 3})), model_path="m")
    group.where = [at("a", uuid) for uuid in ("GPU-1", "GPU-2", "GPU-1")]
    with pytest.raises(LearnerError, match="learner ranks 0 and 2 are both on GPU GPU-1 of a"):
        group._check_devices()
    group.where = [at("a", "GPU-1"), at("b", "GPU-1"), at("a", "")]
    group._check_devices()
