"""One learner rank in another process: its Ray actor, and the handle with which the group calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray

from services.common.processes.stacks import answer_stack_requests
from services.contracts import TokenBatch, TrainBatch, WeightsReceiver, WeightUpdate
from trainer.config.schema import Config
from trainer.learner.rank import LearnerRank
from trainer.learner.results import RankInfo, RankScores, RankUpdate

T = TypeVar("T")


class RankActor(LearnerRank):
    """A rank as a Ray actor: every method of LearnerRank can be called from the driver's process."""

    def __init__(self, config: Config, **options: Any) -> None:
        answer_stack_requests()
        super().__init__(config, **options)

    def address(self) -> str:
        """The IP address of its node."""
        return str(ray.util.get_node_ip_address())


@dataclass(frozen=True)
class Pending(Generic[T]):
    """A rank's answer that is still to come."""

    ref: ray.ObjectRef
    rank: int
    doing: str
    """The call in words, for errors: `learner rank 1 of 2 did not DOING within 60 s`."""


class RankHandle:
    """One rank, as the group sees it. Every method returns at once; for what it does see LearnerRank.

    The batches are references to Ray's object store, so that the ranks of one node share one copy."""

    def __init__(self, actor: Any, rank: int) -> None:
        self.actor = actor
        self.rank = rank

    def address(self) -> Pending[str]:
        return self._pending(self.actor.address.remote(), "start")

    def prepare(self) -> Pending[None]:
        return self._pending(self.actor.prepare.remote(), "load the model")

    def host_store(self, host: str) -> Pending[int]:
        return self._pending(self.actor.host_store.remote(host), "open a port")

    def setup(self, host: str, port: int) -> Pending[RankInfo]:
        return self._pending(self.actor.setup.remote(host, port), "load the model and join the others")

    def score(self, batch: ray.ObjectRef[TokenBatch]) -> Pending[RankScores]:
        return self._pending(self.actor.score.remote(batch), "score")

    def update(
        self,
        batch: ray.ObjectRef[TrainBatch],
        *,
        llds_lambda: float,
        answer_beta: float,
        lr_scale: float,
        supervised: list[TokenBatch] | None = None,
    ) -> Pending[RankUpdate]:
        more = {"supervised": supervised} if supervised else {}
        ref = self.actor.update.remote(
            batch, llds_lambda=llds_lambda, answer_beta=answer_beta, lr_scale=lr_scale, **more
        )
        return self._pending(ref, "update")

    def offer(self, version: int, receivers: list[WeightsReceiver]) -> Pending[WeightUpdate | None]:
        return self._pending(self.actor.offer.remote(version, receivers), "offer")

    def send(self) -> Pending[None]:
        return self._pending(self.actor.send.remote(), "send")

    def free_cached_gpu_memory(self) -> Pending[None]:
        return self._pending(self.actor.free_cached_gpu_memory.remote(), "free cached GPU memory")

    def save(self, path: str, state: dict[str, Any]) -> Pending[None]:
        return self._pending(self.actor.save.remote(path, state), "save")

    def load(self, path: str) -> Pending[dict[str, Any]]:
        return self._pending(self.actor.load.remote(path), "load")

    def export_hf(self, path: str, asked: dict[str, Any] | None) -> Pending[None]:
        return self._pending(self.actor.export_hf.remote(path, asked), "export")

    def shutdown(self) -> Pending[None]:
        return self._pending(self.actor.shutdown.remote(), "shut down")

    def kill(self) -> None:
        """End its process without a farewell. One that has ended already is no error."""
        ray.kill(self.actor)

    def _pending(self, ref: ray.ObjectRef, doing: str) -> Pending[Any]:
        return Pending(ref, self.rank, doing)
