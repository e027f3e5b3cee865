"""The learner as its driver sees it: a group of Ray actors, one per data-parallel rank, behind plain
blocking calls.

    driver ── LearnerGroup ──┬── rank 0  (GPU or CPU) ──┐  torch.distributed (NCCL or gloo), DeepSpeed ZeRO
                             ├── rank 1               ──┤  rank 0 also publishes weights and checkpoints
                             └── ...                  ──┘

Each call goes to all ranks at once. The first rank that fails fails the call, whatever the others wait for.
"""

from __future__ import annotations

import contextlib
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from services.common.errors import EnvironmentLacks, UnspiralError, explains
from services.contracts import TokenBatch, TrainBatch, WeightsReceiver, WeightUpdate
from services.rollout.pool.shares import rank_share
from services.weight_sync.base import ENVIRONMENT_PREFIXES
from trainer.config.algorithm import AlgorithmSettings
from trainer.config.schema import Config
from trainer.learner.lack_of_memory import lack_of_memory
from trainer.learner.model.model_folder import check_model_folder
from trainer.learner.objective import StepStats, update_metrics
from trainer.learner.rank_handle import Pending, RankActor, RankHandle
from trainer.learner.results import RankInfo, RankScores, RankUpdate, Scores, UpdateResult

T = TypeVar("T")

GONE_SECONDS = 20.0
"""Longest wait for a rank's process to be gone."""
_FORWARDED = ("UNSPIRAL_CACHE", "HF_HOME", "HF_HUB_OFFLINE")
"""Variables of the driver's environment that the ranks are given: an allow-list, nothing else travels."""


class LearnerError(UnspiralError):
    """A rank that did not start, answer or survive: the message names it. The loop restores the learner."""

    explained = True


def no_room(line: str) -> LearnerError:
    """The cluster has no room for the ranks: of the exit and HTTP status of EnvironmentLacks."""
    return LearnerError(line, exit_code=EnvironmentLacks.exit_code, status=EnvironmentLacks.status)


class LearnerGroup:
    """All ranks of the learner. Every method blocks; none waits longer than `learner.start_timeout_seconds`
    or `step_timeout_seconds`.

    reference: keep the starting weights, for the KL (needed with algorithm.kl > 0). masked_ids: token ids
    that the sampler can never draw; they are taken out of the learner's softmax too. vLLM samples from every
    row of the embedding, so normally none.
    """

    actor_class: type[RankActor] = RankActor

    def __init__(
        self, config: Config, *, model_path: str, reference: bool = False, masked_ids: list[int] | None = None
    ):
        if config.algorithm.kl and not reference:
            raise ValueError("algorithm.kl > 0 needs the reference model: LearnerGroup(reference=True)")
        self.config = config
        self.model_path = model_path
        self.reference = reference
        self.masked_ids = masked_ids
        self.ranks = config.learner.ranks
        self.where: list[RankInfo] = []
        """One entry per rank, once started."""
        self.held: dict[str, float] = {}
        """Resources of the cluster that all ranks hold together, once started."""
        self._handles: list[RankHandle] = []

    def prepare(self) -> None:
        """Place the ranks, and load the model into their host memory, without a use of their devices. May be
        left out before `start`. Raises what `start` raises."""
        with ExitStack() as undo:
            undo.callback(self.close)
            limit = self.config.learner.start_timeout_seconds
            deadline = time.monotonic() + limit
            self._place(limit, deadline)
            self._results([h.prepare() for h in self._handles], limit, deadline)
            undo.pop_all()

    def start(self) -> None:
        """Place the ranks, load the model, join them. Raises LearnerError (of exit status 3 without room for
        them), or what a rank raised for a mistake of the user's (UserError of
        `trainer.learner.model.model_folder`)."""
        limit = self.config.learner.start_timeout_seconds
        deadline = time.monotonic() + limit
        with ExitStack() as undo:
            undo.callback(self.close)
            if not self._handles:
                self._place(limit, deadline)
            [host] = self._results([self._handles[0].address()], limit, deadline)
            [port] = self._results([self._handles[0].host_store(host)], limit, deadline)
            self.where = self._results([h.setup(host, port) for h in self._handles], limit, deadline)
            self._check_devices()
            undo.pop_all()

    def _place(self, limit: float, deadline: float) -> None:
        """Start the ranks' processes, and wait until each has its place."""
        check_model_folder(self.model_path)
        demand = self.demand()
        self.held = {name: n * self.ranks for name, n in demand.items()}
        create = ray.remote(self.actor_class).options(
            num_cpus=demand["CPU"],
            num_gpus=demand.get("GPU", 0),
            resources={k: v for k, v in demand.items() if k not in ("CPU", "GPU")},
            runtime_env={"env_vars": self._environment()},
            # A rank that Ray started again would have no weights and no process group: the driver restores
            # all of them together.
            max_restarts=0,
        )
        options = {
            "model_path": str(self.model_path),
            "reference": self.reference,
            "masked_ids": self.masked_ids,
        }
        for rank in range(self.ranks):
            self._handles.append(RankHandle(create.remote(self.config, rank=rank, **options), rank))
        self._results([h.address() for h in self._handles], limit, deadline, demand)

    def _check_devices(self) -> None:
        """Raises LearnerError where two ranks are on one GPU, which NCCL refuses with a message that
        does not say so."""
        seen: dict[tuple[str, str], int] = {}
        for rank, where in enumerate(self.where):
            uuid = where.device_uuid
            if uuid and (other := seen.setdefault((where.host, uuid), rank)) != rank:
                raise no_room(
                    f"learner ranks {other} and {rank} are both on GPU {uuid} of {where.host}; unset "
                    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, so that Ray gives each process its own"
                )

    def close(self) -> None:
        """End every rank and wait until its process is gone."""
        handles = self._handles
        self._handles = []
        if not handles:
            return
        with contextlib.suppress(RayError):  # also GetTimeoutError: a rank that hangs is killed below
            ray.get([h.shutdown().ref for h in handles], timeout=5)
        for handle in handles:
            handle.kill()
        # A rank that is stopped (SIGSTOP) hears nothing; its node kills it after 5 s.
        here = os.uname().nodename
        deadline = time.monotonic() + GONE_SECONDS
        pids = [where.pid for where in self.where if where.host == here]
        while any(Path(f"/proc/{p}").exists() for p in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.where = []

    def score(self, batch: TokenBatch) -> Scores:
        """Log-probs and entropies under the current weights, at `rollout.temperature`."""
        handles = self._running()
        # Put once: as a plain argument it would be copied into the object store for each rank.
        shared = ray.put(batch)
        return gathered(batch, self._results([h.score(shared) for h in handles]))

    def update(
        self,
        batch: TrainBatch,
        *,
        llds_lambda: float,
        answer_beta: float = 1.0,
        lr_scale: float = 1.0,
        supervised: list[TokenBatch] | None = None,
    ) -> UpdateResult:
        """Train on a batch: `minibatches_per_batch` x `epochs` optimiser steps, then one on each batch of
        demonstrations of `supervised`.

        A step whose loss or gradient norm is not finite is skipped and counted. A batch in which no term of
        the loss can act is scored, and no step is taken.
        """
        handles = self._running()
        shared = ray.put(batch)
        results = self._results(
            [
                h.update(
                    shared,
                    llds_lambda=llds_lambda,
                    answer_beta=answer_beta,
                    lr_scale=lr_scale,
                    supervised=supervised,
                )
                for h in handles
            ]
        )
        return joined(batch, results, self.config.algorithm, llds_lambda, answer_beta)

    def offer_weights(self, version: int, receivers: list[WeightsReceiver]) -> WeightUpdate:
        """Offer the current weights to rollout workers as `version`. The result goes to the pool's `sync`,
        while `send_weights` runs."""
        first, *_ = self._results([h.offer(version, receivers) for h in self._running()])
        assert first is not None, "rank 0 makes the offer"
        return first

    def send_weights(self) -> None:
        """Send what was offered last. Raises GroupMismatchError, GroupBrokenError (services.weight_sync)
        within `weight_sync.timeout_seconds`."""
        self._results([h.send() for h in self._running()])

    def free_cached_gpu_memory(self) -> None:
        """Give the GPU memory that PyTorch caches back to the device, for the workers' turn
        (`rollout.share_gpus`). Weights and gradients stay."""
        self._results([h.free_cached_gpu_memory() for h in self._running()])

    def save(self, path: str | Path, state: dict[str, Any]) -> None:
        """Checkpoint to the folder `path`: weights, optimiser, schedule, snapshot, RNG, and the driver's own
        JSON `state`. Raises CheckpointNotWritten."""
        self._results([h.save(str(path), state) for h in self._running()])

    def load(self, path: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint, of any number of ranks and any ZeRO stage. Returns the driver's state.
        Raises UserError for a checkpoint that is torn or of another model."""
        return self._results([h.load(str(path)) for h in self._running()])[0]

    def export_hf(self, path: str | Path, asked: dict[str, Any] | None = None) -> None:
        """The policy as a plain Hugging Face folder with its tokenizer. asked: `how_asked`, for its
        description."""
        self._results([h.export_hf(str(path), asked) for h in self._running()])

    # Talking to the ranks

    def _running(self) -> list[RankHandle]:
        if not self._handles:
            raise LearnerError("the learner is not running; call start() first")
        return self._handles

    def _results(
        self,
        pending: list[Pending[T]],
        limit: float | None = None,
        deadline: float | None = None,
        demand: dict[str, float] | None = None,
    ) -> list[T]:
        """All answers to one call, or the error of the first rank that fails.

        limit: seconds, counted to `deadline` (monotonic) where that is given; `step_timeout_seconds` by
        default. demand: of one rank, where the actors may still be waiting for their place."""
        limit = self.config.learner.step_timeout_seconds if limit is None else limit
        deadline = time.monotonic() + limit if deadline is None else deadline
        of_ref = {p.ref: p for p in pending}
        waiting = list(of_ref)
        results: dict[ray.ObjectRef, T] = {}
        # One at a time, and not ray.get of all: when a rank dies, the others hang in a collective operation,
        # and its error must not wait for them.
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                self._late([of_ref[ref] for ref in waiting], limit, demand)
            results[done[0]] = self._result(of_ref[done[0]])
        return [results[p.ref] for p in pending]

    def _late(self, waiting: list[Pending[T]], limit: float, demand: dict[str, float] | None) -> NoReturn:
        ranks = ", ".join(str(p.rank) for p in waiting)
        if demand and (lacking := self._lacking(demand)):
            raise no_room(
                f"learner rank {ranks} of {self.ranks} found no place within {limit:g} s: {lacking}"
            )
        raise LearnerError(
            f"learner rank {ranks} of {self.ranks} did not {waiting[0].doing} within {limit:g} s"
        )

    def _result(self, pending: Pending[T]) -> T:
        name = f"learner rank {pending.rank} of {self.ranks}"
        try:
            result: T = ray.get(pending.ref)
            return result
        except RayTaskError as e:
            if explains(e.cause):  # its message is whole: the user's mistake, or a full disk
                raise e.cause from None
            if lack := lack_of_memory(e.cause, self.config.learner):
                raise LearnerError(f"{name}: {pending.doing} ran out of memory{lack}") from e
            raise LearnerError(f"{name}: {pending.doing} failed: {type(e.cause).__name__}: {e.cause}") from e
        except RayError as e:  # it died in its __init__, was killed, ran out of memory, or its node is gone
            text = str(getattr(e, "cause", None) or e).strip()
            line = text.splitlines()[0 if isinstance(e, ray.exceptions.OutOfMemoryError) else -1].strip()
            raise LearnerError(f"{name} died ({pending.doing}): {type(e).__name__}: {line}") from e

    def demand(self) -> dict[str, float]:
        """Resources that one rank asks of the cluster. Raises LearnerError where the cluster can
        never hold all ranks."""
        have = ray.cluster_resources()
        demand = {"CPU": 1.0}
        demand |= {"GPU": rank_share(self.config.rollout)} if have.get("GPU") else {}
        demand |= {"learner": 1.0} if have.get("learner") else {}
        if lacking := [k for k, v in demand.items() if v * self.ranks > have.get(k, 0.0)]:
            asked = ", ".join(f"{v * self.ranks:g} {k}" for k, v in demand.items())
            there = ", ".join(f"{have.get(k, 0.0):g} {k}" for k in demand)
            raise no_room(
                f"learner.ranks={self.ranks} asks for {asked}; the cluster has {there} "
                f"(too little {lacking[0]})"
            )
        return demand

    def _lacking(self, demand: dict[str, float]) -> str:
        free = ray.available_resources()
        return ", ".join(
            f"it asks for {v:g} {k}, of which {free.get(k, 0.0):g} is free"
            for k, v in demand.items()
            if free.get(k, 0.0) < v
        )

    def _environment(self) -> dict[str, str]:
        cache = Path(os.environ.get("UNSPIRAL_CACHE") or Path.home() / ".cache" / "unspiral")
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        if self.config.learner.offload_optimizer:
            # AdamW steps on the CPU: with one thread that takes seconds for a billion parameters.
            threads = str(max(1, (os.cpu_count() or 1) // self.ranks))
        fixed = {
            "OMP_NUM_THREADS": threads,
            "TORCH_EXTENSIONS_DIR": str(cache / "torch_extensions"),
            # Of torch, at each collective operation of DeepSpeed's.
            "PYTHONWARNINGS": "ignore::FutureWarning",
        }
        # Said in both cases: an inherited value would put the model on another device than its batches.
        fixed["DS_ACCELERATOR"] = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
        return fixed | {
            k: v for k, v in os.environ.items() if k in _FORWARDED or k.startswith(ENVIRONMENT_PREFIXES)
        }


def joined(
    batch: TrainBatch,
    results: list[RankUpdate],
    algorithm: AlgorithmSettings,
    llds_lambda: float,
    answer_beta: float,
) -> UpdateResult:
    """One batch's update, from what all ranks did with it."""
    scores = gathered(batch, [result.scores for result in results])
    # Every rank takes the same steps: the n-th entries of all ranks are one step.
    steps = [StepStats.merged(list(step)) for step in zip(*(r.steps for r in results), strict=True)]
    metrics = update_metrics(steps, kl=bool(algorithm.kl)) | results[0].metrics | batch_metrics(batch, scores)
    metrics["time/update_compute"] = max(r.metrics["time/update_compute"] for r in results)
    if llds_lambda and algorithm.llds.answer_weight != "off":
        metrics["llds/beta"] = answer_beta
    # All ranks change together, and each tells it of its own share; that of the first is enough.
    return UpdateResult(scores.logp, scores.entropy, metrics, sum(s.skipped for s in steps), results[0].told)


def gathered(batch: TokenBatch, ranks: list[RankScores]) -> Scores:
    """Each rank's rows back to their places in the batch."""
    logp = np.zeros(len(batch.token_ids), np.float32)
    entropy = np.zeros(len(batch.token_ids), np.float32)
    for scores in ranks:
        at = 0
        for b in scores.rows:
            place = batch.row(b)
            n = place.stop - place.start
            logp[place] = scores.logp[at : at + n]
            entropy[place] = scores.entropy[at : at + n]
            at += n
    return Scores(logp, entropy)


def batch_metrics(batch: TrainBatch, old: Scores) -> dict[str, float]:
    """Mean entropy over the action tokens of valid trajectories, in nats. old: under the weights before the
    update."""
    mask = (batch.action_ids >= 0) & np.repeat(batch.valid.astype(bool), np.diff(batch.offsets))
    if not mask.any():
        return {}
    return {"entropy": float(old.entropy[mask].mean(dtype=np.float64))}
