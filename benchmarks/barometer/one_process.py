"""A run of the system in one process: the driver, the learner's rank, the agent loop, a BM25 index, the
likelihood service, the probes and the monitor as they are, joined by plain calls.

Left out are Ray, vLLM (its twin on transformers samples) and HTTP between agent and retriever: they take a
minute to start, longer than a run of the laboratory takes. What the monitor reads is made by the same code.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch
from rich.console import Console

import trainer.lab.demo  # noqa: F401  (the names lab:SEED and lab:KIND:SEED)
from benchmarks.barometer.faults import Fault
from retriever_service.client import Hit
from retriever_service.indexing.build import build_index
from retriever_service.search.index import Index
from services.contracts import (
    TokenBatch,
    TrainBatch,
    Trajectory,
    TrajectoryRequest,
    WeightUpdate,
    WorkerInfo,
)
from services.likelihood.client import LikelihoodClient
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from services.rollout.worker.loop import Found
from services.rollout.worker.tokenizer import load_tokenizer
from services.rollout.worker.worker import RolloutWorker
from trainer.config.schema import Config
from trainer.data import PromptCursor, load_questions, models
from trainer.learner.group import gathered, joined
from trainer.learner.rank import LearnerRank
from trainer.learner.results import RankInfo, Scores, UpdateResult
from trainer.loop.driver import Driver
from trainer.loop.records.users_metrics import load_metrics
from trainer.loop.run.progress import Progress
from trainer.loop.run.run_folder import RunFolder
from trainer.loop.run.system import System
from trainer.rewards import make_reward
from trainer.session.resuming.rules import identity_of
from trainer.session.stopping import StopSignals

BUCKET_BYTES = 2**28
HELD_OUT = "held out"
"""Stands for the address of the held-out corpus's retriever."""


class Worker(RolloutWorker):
    """A rollout worker that searches open indexes, and takes weights as tensors."""

    indexes: dict[str, Index]
    fault: Fault

    def _search(self, url: str) -> Callable[[str], Any]:
        return partial(self._found, self.indexes[url])

    async def _found(self, index: Index, query: str) -> Found:
        [raw] = index.search([query], self._settings.topk)
        hits = []
        for body, score in raw:
            document = orjson.loads(body)
            hits.append(Hit(str(document["id"]), document["contents"], score))
        return self.fault.found(query, hits, index)

    async def take(self, weights: dict[str, torch.Tensor], version: int) -> None:
        engine: Any = self._ready(failed_too=True)
        load = partial(engine._model.load_state_dict, weights, strict=False)
        await self._load(engine._replace(version, load), version)


class Pool:
    """What the driver asks of `RolloutPool`, for one worker in this process."""

    wants_weights = False

    def __init__(self, worker: Worker, fault: Fault) -> None:
        self.worker = worker
        self.fault = fault

    async def rollout(
        self, requests: list[TrajectoryRequest], on_done: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        self.fault.sampling(requests)
        done = await self.worker.rollout_batch(requests)
        for trajectory in done if on_done else ():
            on_done(trajectory)
        return done

    def workers(self) -> list[WorkerInfo]:
        return [WorkerInfo("w0.1", os.getpid(), "", 0)]

    async def receivers(self, version: int) -> list[Any]:
        return []

    async def sync(self, update: WeightUpdate) -> None:
        await self.worker.take(self.fault.sent(update.payload, update.version), update.version)


class Learner:
    """What the driver asks of `LearnerGroup`, for one rank in this process."""

    def __init__(self, config: Config, model: Path, fault: Fault) -> None:
        self.config = config
        self.fault = fault
        self.rank = LearnerRank(config, model_path=str(model), reference=config.algorithm.kl > 0, rank=0)
        self.where: list[RankInfo] = []

    def start(self) -> None:
        self.where = [self.rank.setup("127.0.0.1", self.rank.host_store("127.0.0.1"))]

    def update(
        self, batch: TrainBatch, *, llds_lambda: float, answer_beta: float = 1.0, lr_scale: float = 1.0
    ) -> UpdateResult:
        done = self.rank.update(batch, llds_lambda=llds_lambda, answer_beta=answer_beta, lr_scale=lr_scale)
        self.fault.updated(self.rank)
        return joined(batch, [done], self.config.algorithm, llds_lambda, answer_beta)

    def score(self, batch: TokenBatch) -> Scores:
        return gathered(batch, [self.rank.score(batch)])

    def offer_weights(self, version: int, receivers: list[Any]) -> WeightUpdate:
        weights = {name: tensor.clone() for name, tensor in self.rank.engine.iter_weights(BUCKET_BYTES)}
        return WeightUpdate(version, "plain", weights, sum(t.nbytes for t in weights.values()))

    def send_weights(self) -> None:
        """They went with the offer."""

    def save(self, path: str | Path, state: dict[str, Any]) -> None:
        """A cell takes two minutes: it is begun anew, not resumed."""


async def run(config: Config, fault: Fault) -> dict[str, Any]:
    """Train. Returns the summary; the run's files lie in its folder."""
    model = models.resolve(config.model.path)
    folder = RunFolder(config)
    folder.open(resume=True)
    for file in (folder.metrics_path, folder.path / "events.jsonl"):
        file.unlink(missing_ok=True)
    console = Console(width=160)
    progress = Progress(config.trainer.steps, console)
    async with AsyncExitStack() as stack:
        stack.callback(folder.close)
        aside = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store_url = f"sqlite:{aside / 'likelihood.db'}"
        service = serve_in_thread(ServeSettings(store=store_url, port=0, rules=config.monitor.rules))
        stack.callback(service.stop)
        store = LikelihoodClient(service.url, spool_dir=aside / "spool")
        stack.callback(store.close)
        indexes = {}
        corpora = {"train": config.retriever.corpus}
        if config.evaluation.retriever:
            corpora[HELD_OUT] = config.evaluation.retriever.corpus
        for name, corpus in corpora.items():
            build_index(models.resolve_file(corpus), aside / name.replace(" ", "_"))
            indexes[name] = Index(aside / name.replace(" ", "_"))
        worker = Worker(
            "w0", config.rollout, model_path=str(model), retriever_url="train",
            retriever_timeout_seconds=60.0, seed=config.seed,
        )  # fmt: skip
        worker.indexes = indexes
        worker.fault = fault
        await worker.start()
        stack.push_async_callback(worker.close)
        fault.engine(worker._engine, load_tokenizer(model), config.rollout)
        learner = Learner(config, model, fault)
        await asyncio.to_thread(learner.start)
        stack.callback(learner.rank.shutdown)
        questions = load_questions(models.resolve_file(config.data.train)).rows
        held_out: list[Any] = []
        if config.data.eval:
            held_out = load_questions(models.resolve_file(config.data.eval)).rows[: config.evaluation.limit]
        reward = make_reward(config.reward.kind)
        system: Any = System(
            tokenizer=load_tokenizer(model),
            eval_questions=held_out,
            retriever_url="train",
            eval_retriever_url=HELD_OUT if HELD_OUT in indexes else None,
            pool=Pool(worker, fault),  # type: ignore[arg-type]
            config=config,
            folder=folder,
            cursor=PromptCursor(questions, config.seed, config.data.shuffle),
            store=store,
            learner=learner,  # type: ignore[arg-type]
            reward=lambda trajectory: fault.reward(trajectory, reward(trajectory)),
            metrics=load_metrics(config.trainer.metrics),
            identity=identity_of(config, model),
        )
        with StopSignals(progress.say) as stop:
            driver = Driver(system, progress, stop)
            summary = await driver.run()
            stop.settle()
        summary |= {"exit": 0 if driver.step == config.trainer.steps else 1}
        folder.summary(summary)
        return summary


def train(config: Config, fault: Fault) -> dict[str, Any]:
    """`run`, as a whole process: one thread, on the CPU."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(1)
    return asyncio.run(run(config, fault))
