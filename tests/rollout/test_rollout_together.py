"""Several workers on one GPU (`rollout.workers_per_gpu`): their places, their memory, the order in which
their engines start, and what is refused."""

import asyncio
from types import SimpleNamespace

import pytest
from bare_start import bare_start
from fake_gpus import lines_of
from rollout_fakes import ScriptedWorker
from scripted_pool import pool_of, until

from services.common.errors import EnvironmentLacks, UserError
from services.contracts import WeightsReceiver, WorkerInfo
from services.rollout.errors import WorkerLostError
from services.rollout.pool import placement
from services.rollout.pool.neighbours import WAITS_FOR
from services.rollout.pool.shares import of_one_worker, rank_share, worker_share
from services.settings import MOST_WORKERS_PER_GPU, RolloutSettings, WeightSyncSettings
from services.weight_sync import choose_backend
from trainer.config.schema import parse_config
from trainer.session.run_services import Services


def raw(**sections):
    return {"model": {"path": "m"}, "data": {"train": "t"}, "retriever": {"url": "http://x"}} | sections


def several(n, **more):
    return RolloutSettings(workers_per_gpu=n, **more)


# -- the configuration


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {"rollout": {"workers_per_gpu": 2, "tensor_parallel": 2}},
            r"rollout.workers_per_gpu=2 with rollout.tensor_parallel=2: a GPU has several workers, or a "
            r"worker several GPUs. Set one of them to 1$",
        ),
        (
            {"rollout": {"workers_per_gpu": 2}, "weight_sync": {"backend": "nccl"}},
            r"weight_sync.backend=nccl does not work with rollout.workers_per_gpu=2: two ranks of NCCL "
            r"cannot share a GPU, and gloo is for CPUs. Set it to auto or shared_memory$",
        ),
        (
            {"rollout": {"workers_per_gpu": 2}, "weight_sync": {"backend": "gloo"}},
            "weight_sync.backend=gloo does not work with rollout.workers_per_gpu=2",
        ),
        (
            {"rollout": {"workers_per_gpu": 4, "workers": 2}},
            r"rollout.workers=2 is less than rollout.workers_per_gpu=4: .* to 4 or more, or to all$",
        ),
        (
            {
                "rollout": {"workers_per_gpu": 2, "workers": 3, "share_gpus": True},
                "learner": {"ranks": 2},
            },
            r"needs rollout.workers of at least 4, 2 for each of learner.ranks=2: each rank shares the GPU "
            r"of 2 workers$",
        ),
        ({"rollout": {"workers_per_gpu": 0}}, "rollout.workers_per_gpu"),
        ({"rollout": {"workers_per_gpu": MOST_WORKERS_PER_GPU + 1}}, "rollout.workers_per_gpu"),
    ],
)
def test_what_does_not_go_with_workers_on_one_gpu_is_refused_in_one_line(sections, line):
    with pytest.raises(UserError, match=line):
        parse_config(raw(**sections))


def test_workers_are_those_of_one_gpu_where_their_number_is_not_given():
    made = parse_config(raw(rollout={"workers_per_gpu": 3})).rollout
    assert made.workers == 3 and "workers" not in made.model_fields_set
    assert parse_config(raw()).rollout.workers == 1
    assert parse_config(raw(rollout={"workers_per_gpu": 2, "workers": 5})).rollout.workers == 5
    assert parse_config(raw(rollout={"workers_per_gpu": 2, "workers": "all"})).rollout.workers == "all"


def test_weights_go_through_host_memory():
    receivers = [WeightsReceiver(f"w{i}.1", 1, worker_share(several(2))) for i in range(2)]
    assert choose_backend(WeightSyncSettings(), learner_gpu=True, receivers=receivers) == "shared_memory"


# -- shares and numbers


@pytest.mark.parametrize("n", range(1, MOST_WORKERS_PER_GPU + 1))
@pytest.mark.parametrize("share_gpus", [False, True], ids=["alone", "with a rank"])
def test_so_many_workers_fit_on_a_gpu_and_never_one_more(n, share_gpus):
    settings = several(n, share_gpus=share_gpus)
    ten_thousandths = round(worker_share(settings) * 10_000)
    assert ten_thousandths == pytest.approx(worker_share(settings) * 10_000), "as fine as Ray counts"
    rank = round(rank_share(settings) * 10_000) if share_gpus else 0
    assert n * ten_thousandths + rank <= 10_000 < (n + 1) * ten_thousandths
    if share_gpus:
        assert n * ten_thousandths + 2 * rank > 10_000, "a full GPU has room for one rank alone"


def test_workers_are_counted_by_gpu_and_by_place():
    two = {"CPU": 8.0, "GPU": 2.0}
    assert placement.count(several(3, workers="all"), two, learner_gpus=1) == 3
    assert placement.count(several(3, workers="all"), two | {"rollout": 1.0}) == 3
    assert placement.count(several(3, workers="all"), {"CPU": 8.0, "rollout": 2.0}) == 2, "no GPUs"
    assert placement.demand(several(2), two | {"rollout": 1.0}) == {"rollout": 0.5, "GPU": 0.5}
    assert placement.demand(several(2), {"CPU": 8.0, "rollout": 2.0}) == {"rollout": 1}
    assert placement.demand(several(3, share_gpus=True), two) == {"GPU": 0.2666}


@pytest.mark.parametrize(
    ("settings", "ranks", "gpus", "line"),
    [
        ({"workers": 2}, 1, 2, None),
        ({"workers": 4}, 1, 3, None),
        ({"workers": "all"}, 1, 3, None),
        ({"workers": 2, "share_gpus": True}, 1, 1, None),
        (
            {"workers": 5},
            1,
            3,
            "learner.ranks=1 and rollout.workers=5 (rollout.workers_per_gpu=2) need 4 GPUs; the cluster has "
            "3, with room for 4 workers. Ask for fewer, or set rollout.share_gpus=true",
        ),
        (
            {"workers": 3, "share_gpus": True},
            1,
            1,
            "rollout.share_gpus=true with rollout.workers=3 (rollout.workers_per_gpu=2) and learner.ranks=1 "
            "needs 2 GPUs; the cluster has 1, with room for 2 workers",
        ),
    ],
)
def test_more_workers_than_fit_are_said_before_anything_starts(settings, ranks, gpus, line):
    supply = {"CPU": 8.0, "GPU": float(gpus)}
    if line is None:
        placement.check_gpus(several(2, **settings), ranks, supply)
        return
    with pytest.raises(EnvironmentLacks) as e:
        placement.check_gpus(several(2, **settings), ranks, supply)
    assert str(e.value) == line


def test_a_number_that_is_scaled_to_beyond_the_gpus_is_said_with_both():
    supply = {"CPU": 8.0, "GPU": 3.0}
    held = {"GPU": 1.0}
    assert placement.lacking(several(3), 6, supply, held) is None
    assert placement.lacking(several(2), 5, supply, held) == (
        "5 rollout workers ask for GPU 2.5; the cluster has GPU 3, of which the learner has GPU 1"
    )
    turns = several(2, share_gpus=True)
    ten = {"GPU": 10.0}
    held = {"GPU": rank_share(turns)}
    assert placement.lacking(turns, 20, ten, held) is None
    assert placement.lacking(turns, 21, ten, held) == (
        "21 rollout workers ask for GPU 7.6986; the cluster has GPU 10, of which the learner has GPU 0.2668, "
        "with room for 20 workers"
    )


# -- memory


@pytest.mark.vllm
@pytest.mark.parametrize(("n", "share"), [(1, 0.6), (3, 0.2)])
def test_the_workers_of_a_gpu_divide_its_memory(vllm_on_a_gpu, n, share):
    from services.rollout.engines.vllm_engine import _arguments

    given = _arguments(of_one_worker(several(n)), "m", 0)
    assert given["gpu_memory_utilization"] == pytest.approx(share)
    fixed = _arguments(of_one_worker(several(n, kv_cache_gib=4)), "m", 0)
    assert fixed["kv_cache_memory_bytes"] == 4 * 2**30, "of each"
    assert fixed["gpu_memory_utilization"] == pytest.approx(share), "that must be free when it starts"


# -- the order of starts


class Gpus:
    """Room for as many workers as are asked for, on GPUs in turn; a worker is up once it is let."""

    def __init__(self, monkeypatch, gpus, share=0.5):
        self.gpus = gpus
        self.placed = 0
        self.starting = []
        self.up = {}
        self.dies = set()
        self.workers = {}
        self.killed = {}
        """Of each worker that starts its engine those that were killed by then."""
        self.share = share
        monkeypatch.setattr(placement, "reserve", self.reserve)
        monkeypatch.setattr(placement, "create_worker", self.create_worker)
        monkeypatch.setattr(placement.ray, "cluster_resources", lambda: {"GPU": 2.0})

    async def reserve(self, settings):
        return SimpleNamespace(bundle_specs=[{"GPU": self.share}])

    def create_worker(self, id, *arguments):
        gpu = self.gpus[self.placed % len(self.gpus)]
        self.placed += 1
        self.up[id] = asyncio.Event()

        async def answers(method, *args):
            if method == "start":
                self.starting.append(id)
                self.killed[id] = [name for name, worker in self.workers.items() if worker.killed]
                await self.up[id].wait()
                if id in self.dies:
                    raise WorkerLostError(f"worker {id} is gone")
            return WorkerInfo(id, 1, "here", 0, state="ready", gpu_ids=gpu)

        self.workers[id] = ScriptedWorker(answers)
        return self.workers[id]


async def test_engines_of_one_gpu_start_one_after_the_other_and_those_of_two_together(monkeypatch):
    gpus = Gpus(monkeypatch, ["0", "1", "0", "1"])
    pool = pool_of(workers=4, workers_per_gpu=2)
    start = asyncio.create_task(pool.start())
    try:
        await until(lambda: list(pool._roster.stages.values()).count(WAITS_FOR) == 2)
        assert gpus.starting == ["w0.1", "w1.1"]
        gpus.up["w1.1"].set()
        await until(lambda: len(gpus.starting) == 3)
        assert gpus.starting == ["w0.1", "w1.1", "w3.1"], "the one on the same GPU"
        for event in gpus.up.values():
            event.set()
        await asyncio.wait_for(start, 60)
        assert gpus.starting == ["w0.1", "w1.1", "w3.1", "w2.1"]
        assert [w.state for w in pool.workers()] == ["ready"] * 4
    finally:
        await pool.close()


@pytest.mark.parametrize("end", ["given up", "dies"])
async def test_a_worker_that_does_not_come_up_is_killed_before_its_neighbour_starts(monkeypatch, end):
    """It may hold memory: what becomes free while the neighbour measures keeps that one from starting."""
    gpus = Gpus(monkeypatch, ["0"])
    pool = pool_of(target=2, workers_per_gpu=2)
    pool._membership._fill()
    try:
        await until(lambda: WAITS_FOR in pool._roster.stages.values())
        (first,) = gpus.starting
        if end == "dies":
            gpus.dies.add(first)
            gpus.up[first].set()
        else:
            pool._membership._give_up_start(int(first[1]))
        await until(lambda: len(gpus.starting) == 2)
        assert gpus.killed[gpus.starting[1]] == [first]
        gpus.up[gpus.starting[1]].set()
        await until(lambda: len(pool._roster.members) == 1)
        assert [m.id for m in pool._roster.all()] == [gpus.starting[1]]
    finally:
        await pool.close()


async def test_workers_with_a_gpu_each_or_none_start_together(monkeypatch):
    for n, share in ((1, 0.6), (2, 0.0)):
        gpus = Gpus(monkeypatch, [""], share)
        pool = pool_of(target=2, workers_per_gpu=n)
        pool._membership._fill()
        await until(lambda gpus=gpus: len(gpus.starting) == 2)
        await pool.close()


async def test_the_learner_has_its_gpus_before_workers_take_parts_of_any(monkeypatch):
    """Ray spreads parts over nodes: a part of each GPU in use leaves no whole one for a rank."""
    told = []

    class Ranks:
        where = (SimpleNamespace(activations=""),)

        def prepare(self):
            told.append("ranks")

        def start(self):
            told.append("started")

        def demand(self):
            return {"GPU": 1.0}

        def close(self):
            pass

    async def start_services(config, stack, say, *, records):
        return Services("http://x", None, SimpleNamespace())

    gpus = Gpus(monkeypatch, ["0"])
    create = gpus.create_worker

    def create_worker(id, *arguments):
        told.append("worker")
        made = create(id)
        gpus.up[id].set()
        return made

    monkeypatch.setattr(placement, "create_worker", create_worker)
    start_system = bare_start(
        monkeypatch,
        resources={"CPU": 8.0, "GPU": 2.0},
        learner=Ranks(),
        start_services=start_services,
        pool=pool_of(workers=2, workers_per_gpu=2),
    )
    async with start_system(parse_config(raw(rollout={"workers_per_gpu": 2})), told.append):
        heard = [text for text in told if text in ("worker", "ranks", "started")]
        assert heard[0] == "ranks" and sorted(heard[1:]) == ["started", "worker", "worker"]


# -- a Ray that has GPUs


@pytest.mark.ray
async def test_two_workers_see_one_gpu_a_third_the_next_and_a_successor_its_own():
    """Fake GPUs, in a process of its own."""
    script = """
import asyncio, ray
from reliability_actors import GpuWorker
from services.common.errors import EnvironmentLacks
from services.rollout.pool import placement
from services.rollout.pool.placement import WorkerArguments
from services.settings import RolloutSettings, WeightSyncSettings
ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
placement.RolloutWorker = GpuWorker
async def seen():
    settings = RolloutSettings(engine="transformers", workers_per_gpu=2, start_timeout_seconds=60)
    arguments = WorkerArguments("", "", 1, WeightSyncSettings())
    async def one(i):
        group = await placement.reserve(settings)
        worker = placement.create_worker(f"w{i}.1", settings, group, arguments)
        return await worker.info(timeout_seconds=200), worker
    workers = [await one(i) for i in range(4)]
    first = [gpu for gpu, _ in workers]
    full = settings.model_copy(update={"start_timeout_seconds": 1.0})
    try:
        await placement.reserve(full)
        room = "room"
    except EnvironmentLacks as e:
        room = "GPU 0.5" in str(e) and "GPU 0 free of 2" in str(e)
    gone, worker = workers[0]
    worker.kill()
    again = await one(4)
    return first, room, again[0] == gone
print("saw", asyncio.run(seen()))
"""
    said, written = lines_of(script, 250)
    assert said == ["saw (['0', '0', '1', '1'], True, True)"], written
