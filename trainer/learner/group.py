"""The learner as its driver sees it: a group of Ray actors, one a data-parallel rank, behind plain blocking
calls.

    driver ── LearnerGroup ──┬── rank 0  (GPU or CPU)  ──┐  torch.distributed (NCCL or gloo), DeepSpeed ZeRO
                             ├── rank 1                ──┤  rank 0 also publishes weights and writes checkpoints
                             └── ...                   ──┘

Each call goes to all ranks at once. The first rank that fails fails the call, whatever the others wait for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from services.contracts import TokenBatch, WeightsReceiver, WeightUpdate
from services.likelihood.metrics.step_metrics import sampler_mismatch
from services.rollout.pool.placement import SHARED
from services.weight_sync.base import ENVIRONMENT_PREFIXES
from trainer.config.schema import Config
from trainer.learner.checkpoint import export_checkpoint
from trainer.learner.model_folder import check_model_folder

__all__ = [
    "LearnerError",
    "LearnerGroup",
    "LearnerPlacementError",
    "Scores",
    "UpdateResult",
    "batch_metrics",
    "export_checkpoint",
]

GONE_SECONDS = 20.0
"""Longest wait for a rank's process to be gone."""
_FORWARDED = (
    "UNSPIRAL_CACHE",
    "HF_HOME",
    "HF_HUB_OFFLINE",
)  # an allow-list: nothing else of the driver's environment travels


class LearnerError(RuntimeError):
    """A rank that did not start, answer or survive: the message names it."""

    exit_code = 1


class LearnerPlacementError(LearnerError):
    """The cluster has no room for the ranks."""

    exit_code = 3


@dataclass(frozen=True)
class Scores:
    """Log-probs (nats) and entropies of a batch, float32 [sum T] each, 0 outside the action mask."""

    logp: np.ndarray
    entropy: np.ndarray


@dataclass(frozen=True)
class UpdateResult:
    """One batch's update. `logp_old` and `entropy_old` [sum T] are under the weights before its first
    step."""

    logp_old: np.ndarray
    entropy_old: np.ndarray
    metrics: dict[str, float]
    skipped_steps: int
    """Optimiser steps that were not taken because the loss or the gradient norm was not finite."""

    @property
    def moved(self) -> bool:
        """Whether the weights are others than before."""
        return self.metrics["learner/optimiser_steps"] > 0

    @property
    def idle(self) -> bool:
        """Whether no step was due: nothing in the batch could act."""
        return not self.moved and not self.skipped_steps


class RankActor:
    """Ray's side of one rank. The rank itself is imported here, so that the driver's process loads neither
    torch nor DeepSpeed."""

    def __init__(self, config: Config, **options: Any):
        from services.common.stacks import answer_stack_requests
        from trainer.learner.rank import LearnerRank

        answer_stack_requests()
        self.rank = LearnerRank(config, **options)

    def address(self) -> str:
        return ray.util.get_node_ip_address()

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        return getattr(self.rank, method)(*args, **options)


class LearnerGroup:
    """All ranks of the learner. Every method blocks; none waits longer than `learner.start_timeout_seconds`
    or `step_timeout_seconds`.

    reference: keep the starting weights, for the KL (needed with algorithm.kl > 0). masked_ids: token ids
    that the sampler can never draw; they are taken out of the learner's softmax too. vLLM samples from every
    row of the embedding, so normally none.
    """

    actor_class: type = RankActor

    def __init__(
        self, config: Config, *, model_path: str, reference: bool = False, masked_ids: list[int] | None = None
    ):
        if config.algorithm.kl and not reference:
            raise ValueError("algorithm.kl > 0 needs the reference model: LearnerGroup(reference=True)")
        self.config, self.model_path, self.reference, self.masked_ids = (
            config,
            model_path,
            reference,
            masked_ids,
        )
        self.ranks = config.learner.ranks
        self.where: list[dict[str, Any]] = []
        """Of each rank, once started: process id, host, device (with its name and UUID), dtype, whether it
        trains LoRA adapters, and the model's parameters: of the output layer, and of all but it and the input
        embedding."""
        self.held: dict[str, float] = {}
        """What all ranks hold of the cluster, once started."""
        self._actors: list[Any] = []

    def start(self) -> None:
        """Place the ranks, load the model, join them. Raises LearnerError (LearnerPlacementError without room
        for them), or what a rank raised for a mistake of the user's
        (`trainer.learner.model_folder.ModelFolderError`)."""
        limit = self.config.learner.start_timeout_seconds
        deadline = time.monotonic() + limit
        check_model_folder(self.model_path)
        demand = self.demand()
        self.held = {name: n * self.ranks for name, n in demand.items()}
        create = ray.remote(self.actor_class).options(
            num_cpus=demand["CPU"],
            num_gpus=demand.get("GPU", 0),
            resources={k: v for k, v in demand.items() if k not in ("CPU", "GPU")},
            runtime_env={"env_vars": self._environment()},
            max_restarts=0,
        )
        options = {
            "model_path": str(self.model_path),
            "reference": self.reference,
            "masked_ids": self.masked_ids,
        }
        try:
            self._actors = [create.remote(self.config, rank=rank, **options) for rank in range(self.ranks)]
            hosts = self._wait([a.address.remote() for a in self._actors], "start", limit, deadline, demand)
            [port] = self._wait(
                [self._actors[0].call.remote("host_store", hosts[0])], "open a port", limit, deadline
            )
            setup = [a.call.remote("setup", hosts[0], port) for a in self._actors]
            self.where = self._wait(setup, "load the model and join the others", limit, deadline)
            self._check_devices()
        except BaseException:
            self.close()
            raise

    def _check_devices(self) -> None:
        """Raises LearnerPlacementError where two ranks are on one GPU, which NCCL refuses with a message that
        does not say so."""
        seen: dict[tuple[str, str], int] = {}
        for rank, where in enumerate(self.where):
            uuid = where.get("device_uuid")
            if uuid and (other := seen.setdefault((where["host"], uuid), rank)) != rank:
                raise LearnerPlacementError(
                    f"learner ranks {other} and {rank} are both on GPU {uuid} of {where['host']}; unset "
                    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, so that Ray gives each process its own"
                )

    def close(self) -> None:
        """End every rank and wait until its process is gone."""
        actors, self._actors = self._actors, []
        if not actors:
            return
        with contextlib.suppress(RayError):  # also GetTimeoutError: a rank that hangs is killed below
            ray.get([a.call.remote("shutdown") for a in actors], timeout=5)
        for actor in actors:
            ray.kill(actor)
        # Its node kills one that is stopped and hears nothing after 5 s.
        here, deadline = os.uname().nodename, time.monotonic() + GONE_SECONDS
        pids = [w["pid"] for w in self.where if w["host"] == here]
        while any(Path(f"/proc/{p}").exists() for p in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.where = []

    def score(self, batch: TokenBatch) -> Scores:
        """Log-probs and entropies under the current weights, at `rollout.temperature`."""
        return Scores(*self._gather(batch, self._call("score", ray.put(batch))))

    def update(
        self, batch: TokenBatch, *, llds_lambda: float, answer_beta: float = 1.0, lr_scale: float = 1.0
    ) -> UpdateResult:
        """Train on a batch: `minibatches_per_batch` x `epochs` optimiser steps.

        batch.extra: `advantages` float32 [B], `preserved` bool [B], and optionally `valid` bool [B] (False:
        no part in any loss or count), `answer_mask` bool [sum T]. A step whose loss or gradient norm is not
        finite is skipped and counted. A batch in which no term of the loss can act is scored, and no step is
        taken.
        """
        from trainer.learner.objective import StepStats, update_metrics

        missing = [k for k in ("advantages", "preserved") if k not in batch.extra]
        if missing:
            raise ValueError(f"update: batch.extra lacks {' and '.join(missing)}")
        results = self._call(
            "update", ray.put(batch), llds_lambda=llds_lambda, answer_beta=answer_beta, lr_scale=lr_scale
        )
        logp, entropy = self._gather(batch, [scored for scored, _, _ in results])
        steps = [StepStats.merged(list(ranks)) for ranks in zip(*(s for _, s, _ in results), strict=True)]
        metrics = (
            update_metrics(steps, kl=bool(self.config.algorithm.kl))
            | results[0][2]
            | batch_metrics(batch, logp, entropy)
        )
        metrics["time/update_compute"] = max(facts["time/update_compute"] for _, _, facts in results)
        return UpdateResult(logp, entropy, metrics, sum(s.skipped for s in steps))

    def offer_weights(self, version: int, receivers: list[WeightsReceiver]) -> WeightUpdate:
        """Offer the current weights to rollout workers as `version`. What it gives goes to the pool's `sync`,
        while `send_weights` runs."""
        return self._call("offer", version, receivers)[0]

    def send_weights(self) -> None:
        """Send what was offered last. Raises GroupMismatchError, GroupBrokenError (services.weight_sync)
        within `weight_sync.timeout_seconds`."""
        self._call("send")

    def rest(self) -> None:
        """Give unused GPU memory free: it is the workers' turn (`rollout.share_gpus`). Weights and gradients
        stay."""
        self._call("rest")

    def save(self, path: str | Path, state: dict[str, Any]) -> None:
        """Checkpoint to the folder `path`: weights, optimiser, schedule, snapshot, RNG, and the driver's own
        JSON `state`."""
        self._call("save", str(path), state)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint, of any number of ranks and any ZeRO stage; gives the driver's state.
        Raises CheckpointError."""
        return self._call("load", str(path))[0]

    def export_hf(self, path: str | Path) -> None:
        """The policy as a plain Hugging Face folder with its tokenizer."""
        self._call("export_hf", str(path))

    # Talking to the ranks

    def _call(self, method: str, *args: Any, **options: Any) -> list[Any]:
        if not self._actors:
            raise LearnerError(f"{method}: the learner is not running; call start() first")
        refs = [a.call.remote(method, *args, **options) for a in self._actors]
        return self._wait(refs, method, self.config.learner.step_timeout_seconds)

    def _wait(
        self,
        refs: list[Any],
        what: str,
        limit: float,
        deadline: float | None = None,
        demand: dict[str, float] | None = None,
    ) -> list[Any]:
        """All results, or the error of the first rank that fails. limit: seconds, counted to `deadline` where
        that is given."""
        deadline = deadline or time.monotonic() + limit
        rank_of, waiting = {ref: rank for rank, ref in enumerate(refs)}, list(refs)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                late = ", ".join(str(rank_of[ref]) for ref in waiting)
                if demand and (lacking := self._lacking(demand)):
                    raise LearnerPlacementError(
                        f"learner rank {late} of {self.ranks} found no place within {limit:g} s: {lacking}"
                    )
                raise LearnerError(f"learner rank {late} of {self.ranks} did not {what} within {limit:g} s")
            self._result(done[0], rank_of[done[0]], what)
        return ray.get(refs)

    def _result(self, ref: Any, rank: int, what: str) -> Any:
        try:
            return ray.get(ref)
        except RayTaskError as e:
            if hasattr(e.cause, "exit_code"):
                raise e.cause from None
            raise LearnerError(
                f"learner rank {rank} of {self.ranks}: {what} failed: {type(e.cause).__name__}: {e.cause}"
            ) from e
        except RayError as e:  # it died in its __init__, was killed, ran out of memory, or its node is gone
            text = str(getattr(e, "cause", None) or e).strip()
            line = text.splitlines()[0 if isinstance(e, ray.exceptions.OutOfMemoryError) else -1].strip()
            raise LearnerError(
                f"learner rank {rank} of {self.ranks} died ({what}): {type(e).__name__}: {line}"
            ) from e

    def _gather(self, batch: TokenBatch, scored: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Each rank's rows back to their places."""
        logp, entropy = (np.zeros(len(batch.token_ids), np.float32) for _ in range(2))
        for rows, rank_logp, rank_entropy in scored:
            at = 0
            for b in rows:
                place = batch.row(b)
                n = place.stop - place.start
                logp[place], entropy[place] = rank_logp[at : at + n], rank_entropy[at : at + n]
                at += n
        return logp, entropy

    def demand(self) -> dict[str, float]:
        """What one rank asks of the cluster. Raises LearnerPlacementError where the cluster can never hold
        all of them."""
        have = ray.cluster_resources()
        demand = {"CPU": 1.0}
        share = 1.0 - SHARED if self.config.rollout.share_gpus else 1.0
        demand |= {"GPU": round(share, 4)} if have.get("GPU") else {}
        demand |= {"learner": 1.0} if have.get("learner") else {}
        if lacking := [k for k, v in demand.items() if v * self.ranks > have.get(k, 0.0)]:
            asked = ", ".join(f"{v * self.ranks:g} {k}" for k, v in demand.items())
            there = ", ".join(f"{have.get(k, 0.0):g} {k}" for k in demand)
            raise LearnerPlacementError(
                f"learner.ranks={self.ranks} asks for {asked}; the cluster has {there} (too little {lacking[0]})"
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
            "PYTHONWARNINGS": "ignore::FutureWarning",  # of torch, at each collective operation of DeepSpeed's
        }
        if not ray.cluster_resources().get("GPU"):
            fixed["DS_ACCELERATOR"] = "cpu"
        return fixed | {
            k: v for k, v in os.environ.items() if k in _FORWARDED or k.startswith(ENVIRONMENT_PREFIXES)
        }


def batch_metrics(batch: TokenBatch, logp_old: np.ndarray, entropy_old: np.ndarray) -> dict[str, float]:
    """Entropy, and the mismatch of sampler and learner, over the action tokens of valid trajectories."""
    mask = batch.action_ids >= 0
    if "valid" in batch.extra:
        mask &= np.repeat(batch.extra["valid"].astype(bool), np.diff(batch.offsets))
    if not mask.any():
        return {}
    counted = dataclasses.replace(batch, action_ids=np.where(mask, batch.action_ids, -1))
    return {"entropy": float(entropy_old[mask].mean(dtype=np.float64)), **sampler_mismatch(counted, logp_old)}
