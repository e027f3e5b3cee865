"""The inference engine of a rollout worker, as a protocol: token ids in, token ids and log-probs out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from services.common.errors import UnspiralError
from services.rollout.errors import WorkerUnavailableError

if TYPE_CHECKING:
    from services.weight_sync.group import Ticket


Finish = Literal["stop", "length", "eos"]
"""Why a generation ended: a stop string, `max_tokens`, or the end-of-sequence token."""


@dataclass(frozen=True)
class Generation:
    """One run of sampled tokens. `token_ids` and `logprobs` have the same length; an EOS token, if written,
    is the last of them."""

    token_ids: list[int]
    logprobs: list[float]
    """Nats, at the sampling temperature (at temperature 1 where the sampling was greedy)."""
    text: str
    finish: Finish
    policy_version: int
    """The oldest version that wrote one of the tokens."""


OnTokens = Callable[[list[int]], None]
"""Told the ids that a call has written so far, whenever there are more."""


@dataclass(frozen=True)
class GenerateCall:
    """What an engine is to write."""

    request_id: str
    token_ids: list[int]
    """They are continued."""
    max_tokens: int
    temperature: float
    """0 is greedy."""
    seed: int | None
    stop: tuple[str, ...]
    """Texts that end the writing; they stay in the output."""
    on_tokens: OnTokens | None = None


def check_may_serve(usable: bool, asleep: bool) -> None:
    """usable: whether the engine holds a whole version of the weights. Raises WorkerUnavailableError, and
    UnspiralError where it is asleep."""
    if not usable:
        raise WorkerUnavailableError("the engine holds no whole version of the weights")
    if asleep:
        raise UnspiralError("the engine is asleep: it is the learner's turn on the GPU")


def check_all_loaded(parameters: Iterable[str], loaded: Container[str]) -> None:
    """Raises ValueError where a parameter of the model was left without a value."""
    missing = sorted(name for name in parameters if name not in loaded)
    if missing:
        raise ValueError(
            f"{len(missing)} parameters were not loaded: {', '.join(missing[:4])}"
            + (" ..." if len(missing) > 4 else "")
        )


Waiting = tuple[GenerateCall, "asyncio.Future[Generation]"]
"""A call that waits to be made together with others, and its result."""


async def generate_together(
    generate_batch: Callable[[Sequence[GenerateCall]], Awaitable[list[Generation]]], batch: Sequence[Waiting]
) -> None:
    """Make the calls of a batch at once. An error is that of every call; a caller that has gone gets none."""
    try:
        results = await generate_batch([call for call, _ in batch])
    except Exception as e:
        for _, done in batch:
            if not done.done():
                done.set_exception(e)
    else:
        for (_, done), result in zip(batch, results, strict=True):
            if not done.done():
                done.set_result(result)


class Sampler(Protocol):
    """The part of an engine that one trajectory uses."""

    async def generate(self, call: GenerateCall) -> Generation:
        """Make the call. Its `on_tokens` is called on the event loop, before this returns. Raises
        WorkerLostError."""
        ...


class Engine(Sampler, Protocol):
    """An inference engine with one policy. Its vocabulary is sampled whole: no top-k, no top-p, no forbidden
    tokens."""

    async def generate_batch(self, calls: Sequence[GenerateCall]) -> list[Generation]:
        """All calls together, submitted in the order given before the first step of the engine. Their
        `on_tokens` are called in the thread in which it computes."""
        ...

    async def logprobs(self, token_ids: list[list[int]], temperature: float) -> list[list[float]]:
        """Log-prob (nats) of each token given those before it, with logits divided by `temperature`; the
        first is 0.0."""
        ...

    async def load_weights(self, path: Path, version: int) -> None:
        """Hold sampling, load the safetensors files of a folder whole, empty the prefix cache, go on. Raises
        UnspiralError."""
        ...

    async def sleep(self) -> None:
        """Give the GPU's memory free: weights go to host memory, cached keys and values are dropped. No
        request may be running; until `wake` each raises UnspiralError."""
        ...

    async def wake(self) -> None:
        """Take the memory back, with the weights as they were."""
        ...

    async def receive_weights(self, ticket: Ticket, worker: str, problem: str | None) -> None:
        """Hold sampling, take a version from the ticket's group, empty the prefix cache, go on. problem: why
        these weights can't be this model's; it is told to the group. Raises UnspiralError, and what
        services.weight_sync.broadcast.WeightReceiver raises."""
        ...

    async def lend_weights(self, ticket: Ticket) -> None:
        """Give the engine's own parameters to a joining worker, and go on sampling meanwhile. Raises
        WeightSyncError."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget cached keys and values. Raises RuntimeError where the engine refused."""
        ...

    def check(self) -> None:
        """Raises WorkerLostError where the engine has died."""
        ...

    def pids(self) -> list[int]:
        """Ids of the engine's own processes; none where the model runs in the worker's process."""
        ...

    async def close(self) -> None:
        """End the engine and its processes. May be called again."""
        ...
