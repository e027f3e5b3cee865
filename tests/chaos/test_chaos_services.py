"""A long run of the laboratory's demo while workers are killed, come and go, the retriever is down twice and
Redis once."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from end_to_end import command, events, finish, metrics
from ports import kept_port
from ray_cluster import RayCluster, alive
from redis_server import REDIS, RedisServer
from runs import ask, asked, start, status, until, whole_run

from services.likelihood.store.opening import open_store
from trainer.lab.demo import demo_config, prepare

pytestmark = [pytest.mark.chaos, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(4 * 3600)]

DOWN_SECONDS = 20
ROOM = 4
"""Rollout workers that the cluster has room for."""


class Retriever:
    """`unspiral serve retriever` on a port that stays the same."""

    def __init__(self, index: Path):
        self.index = index
        self.port = kept_port()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process = command("serve", "retriever", "--index", self.index, "--port", self.port, "--topk", 2)
        until(self._answers, self.process, 60)

    def _answers(self) -> bool:
        try:
            return httpx.get(self.url + "/readyz", timeout=2).is_success
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture(scope="module")
def demo(folder, amount):
    """Configuration of the demo for so many steps, but for its retriever and store."""
    files = prepare(folder, amount["seed"])
    index = folder / "index"
    shutil.rmtree(index, ignore_errors=True)
    assert finish(command("index", "build", "--corpus", files.train_corpus, "--out", index))[0] == 0

    def configured(name: str, **sections) -> Path:
        raw = demo_config(files, folder=folder, name=name, seed=amount["seed"], steps=amount["steps"])
        raw["rollout"] |= {"engine": amount["engine"], "workers": 2}
        raw["retriever"] = {"url": sections["retriever"], "timeout_seconds": 30}
        raw["store"] = {"url": sections["store"]} if sections.get("store") else {}
        raw["trainer"] |= {"checkpoint_every": 20}
        raw["control"] = {"port": 0}
        file = folder / f"{name}.yaml"
        file.write_text(json.dumps(raw))
        return file

    configured.index = index
    return configured


def usage(driver: subprocess.Popen, cluster: RayCluster) -> dict[str, dict[str, int]]:
    """Descriptors, memory and threads of the driver and of the learner's rank; how many processes the cluster
    has beside rollout workers."""
    there = [p for node in cluster.nodes for p in node.processes()]
    titles = {p: p.cmdline()[:1] for p in there if alive(p.pid)}
    of_title = lambda title: [p for p, words in titles.items() if words and words[0].startswith(title)]  # noqa: E731
    (rank,) = of_title("ray::RankActor")
    out = {
        name: {"fds": p.num_fds(), "rss": p.memory_info().rss, "threads": p.num_threads()}
        for name, p in (("driver", psutil.Process(driver.pid)), ("rank", rank))
    }
    return out | {"cluster": {"processes": len(titles) - len(of_title("ray::RolloutWorker"))}}


class Havoc(threading.Thread):
    """Breaks one thing after the other while the run goes on, at steps that the seed has drawn."""

    def __init__(
        self,
        run: Path,
        process: subprocess.Popen,
        retriever: Retriever,
        redis: RedisServer | None,
        cluster: RayCluster,
        amount: dict,
    ):
        super().__init__(daemon=True)
        self.run_folder, self.process, self.retriever, self.redis, self.cluster = (
            run,
            process,
            retriever,
            redis,
            cluster,
        )
        self.random, steps = random.Random(amount["seed"]), amount["steps"]
        self.plan: list[tuple[int, str]] = []
        for n, step in enumerate(range(5, steps - 7, 10)):
            self.plan.append((step + self.random.randrange(-2, 3), "kill a worker"))
            self.plan.append((step + 5, "scale" if n % 3 else "drain"))
        self.plan += [(int(steps * share), "retriever down") for share in (0.3, 0.6)]
        self.plan += [(int(steps * 0.45), "Redis down")] if redis else []
        self.plan.sort()
        self.done: list[str] = []
        self.error: BaseException | None = None
        self.usages: list[dict[str, dict[str, int]]] = []

    def run(self) -> None:
        try:
            for step, what in self.plan:
                until(lambda at=step: len(metrics(self.run_folder)) >= at, self.process, 1800)
                self.usages.append(usage(self.process, self.cluster))
                getattr(self, what.lower().replace(" ", "_"))()
                self.done.append(what)
        except BaseException as e:
            self.error = e

    def ready(self) -> list[dict]:
        return [w for w in status(self.run_folder)["workers"] if w["state"] in ("ready", "syncing")]

    def kill_a_worker(self) -> None:
        os.kill(self.random.choice(until(self.ready, self.process))["pid"], signal.SIGKILL)

    def scale(self) -> None:
        ask(self.run_folder, "/v1/workers/scale", {"n": self.random.randrange(1, ROOM + 1)})

    def drain(self) -> None:
        if len(there := until(self.ready, self.process)) > 1:
            ask(self.run_folder, f"/v1/workers/{self.random.choice(there)['id']}/drain")

    def retriever_down(self) -> None:
        self.retriever.kill()
        time.sleep(DOWN_SECONDS)
        self.retriever.start()

    def redis_down(self) -> None:
        self.redis.kill()
        time.sleep(DOWN_SECONDS)
        self.redis.start()


def test_a_run_outlives_all_that_its_services_can_suffer(demo, folder, amount):
    retriever, redis = Retriever(demo.index), RedisServer(folder / "redis") if REDIS else None
    try:
        with RayCluster(rollout=ROOM, learner=1) as cluster:
            shutil.rmtree(folder / "chaos", ignore_errors=True)
            config = demo("undisturbed", retriever=retriever.url)
            whole_run(config, folder / "undisturbed", amount["steps"], environment=cluster.environment)
            process = start(
                demo("chaos", retriever=retriever.url, store=redis and redis.url),
                environment=cluster.environment,
            )
            run = folder / "chaos"
            havoc = Havoc(run, process, retriever, redis, cluster, amount)
            havoc.start()
            code, out = finish(process, 7200)
            havoc.join(120)
        assert code == 0, out
        assert havoc.error is None and havoc.done == [what for _, what in havoc.plan], havoc.error
        check_records(run, amount, redis)
        check_growth(havoc.usages)
        calm, chaotic = (
            json.loads((folder / name / "summary.json").read_text()) for name in ("undisturbed", "chaos")
        )
        print("havoc:", {what: havoc.done.count(what) for what in set(havoc.done)})
        print("EM, undisturbed and not:", {k: (calm[k], chaotic[k]) for k in calm if k.startswith("em_")})
        print("use, early and late:", early(havoc.usages), havoc.usages[-1])
        n = events(run, "evaluation")[0]["overall"]["n"]
        noise = 3 * (2 * 0.25 / n) ** 0.5  # three standard errors of a difference of two shares
        assert abs(calm["em_after"] - chaotic["em_after"]) < noise
    finally:
        retriever.kill()
        if redis:
            redis.stop()


def check_records(run: Path, amount: dict, redis: RedisServer | None) -> None:
    """Each step and uid once, in the run's files and in the store."""
    steps = [s["step"] for s in metrics(run)]
    assert steps == list(range(1, amount["steps"] + 1))
    uids = sorted(asked(run))
    assert uids == [f"{s:06d}-{p:04d}-{g:02d}" for s in steps for p in range(16) for g in range(5)]
    store = open_store(redis.url if redis else f"sqlite:{run / 'likelihood.db'}")
    try:
        stored = [t.uid for s in steps for t in store.trajectories("chaos", s)]
    finally:
        store.close()
    assert sorted(stored) == uids


def early(usages: list) -> dict[str, dict[str, int]]:
    """After a quarter of the run, when all that is filled once is filled."""
    return usages[len(usages) // 4]


def check_growth(usages: list[dict[str, dict[str, int]]]) -> None:
    """From a quarter of the run on: no growth of descriptors, threads or processes, and of memory no more
    than a twentieth and 100 MB."""
    before, after = early(usages), usages[-1]
    for name in ("driver", "rank"):
        for what, more in (("fds", 40), ("threads", 20), ("rss", before[name]["rss"] / 20 + 100e6)):
            assert after[name][what] <= before[name][what] + more, (name, what, before, after)
    assert after["cluster"]["processes"] <= before["cluster"]["processes"] + 4, (
        before,
        after,
    )  # Ray keeps idle ones in stock
