"""A rollout worker: one engine, its agent loops, its weights. A plain class; `services.rollout.pool.pool`
runs it as an asynchronous Ray actor."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from retriever_service.client import Hit, RetrieverClient
from services.common.errors import EnvironmentLacks
from services.common.loading.extras import not_installed
from services.common.processes.stacks import answer_stack_requests, task_stacks
from services.contracts import (
    Observation,
    Span,
    Trajectory,
    TrajectoryRequest,
    WeightsReceiver,
    WeightUpdate,
    WorkerInfo,
)
from services.rollout.engines import vllm_engine
from services.rollout.engines.base import Engine, Sampler
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.errors import WorkerUnavailableError
from services.rollout.worker.barrier import TurnBarrier
from services.rollout.worker.loop import Found, Prompts, Search, prompt_of, run_trajectory
from services.rollout.worker.templates import Template, make_template
from services.rollout.worker.timing import TimedSampler, timed_search
from services.rollout.worker.tokenizer import load_tokenizer
from services.rollout.worker.tools import load_tools
from services.rollout.worker.watching import Watch, WatchedSampler, watched_search
from services.settings import RolloutSettings, WeightSyncSettings
from services.weight_sync import WeightSyncError, make_receiver, untouched
from services.weight_sync.group import Ticket, host_store, offer_loan
from services.weight_sync.manifest import model_shapes, shape_problem
from services.worker_state import WorkerState

JOIN_SECONDS = 0.003
"""Searches of one worker that come within so long of each other go as one request."""


async def start_engine(settings: RolloutSettings, model_path: str, seed: int) -> Engine:
    """Start `settings.engine`; in deterministic mode vLLM is stepped in this process. Raises
    EnvironmentLacks where it is not installed."""
    if settings.engine == "transformers":
        return await TransformersEngine.start(model_path, settings, seed)
    for name, value in vllm_engine.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if importlib.util.find_spec("vllm") is None:
        raise EnvironmentLacks(
            f"rollout.engine=vllm: {not_installed('vllm')}; or set rollout.engine=transformers"
        )
    kind = vllm_engine.LockstepVllmEngine if settings.deterministic else vllm_engine.VllmEngine
    return await kind.start(model_path, settings, seed)


class RolloutWorker:
    """`start()` first; then any number of `rollout` calls at the same time. `info()` answers at any
    moment."""

    def __init__(
        self,
        id: str,
        settings: RolloutSettings,
        *,
        model_path: str,
        retriever_url: str,
        retriever_timeout_seconds: float,
        sync: WeightSyncSettings | None = None,
        seed: int = 0,
    ):
        answer_stack_requests()
        self.id = id
        self._settings = settings
        self._model_path = model_path
        self._seed = seed
        self._retriever_url = retriever_url
        self._retriever_timeout_seconds = retriever_timeout_seconds
        self._sync_settings = sync or WeightSyncSettings()
        self._receiver = make_receiver(self._sync_settings, model_path)
        self._shapes: tuple[dict[str, tuple[int, ...]], set[str]] | None = None
        self._meeting_place: Any = None
        """The TCPStore where the takers of this worker's weights meet it; None before the first loan."""
        self._clients: dict[str, RetrieverClient] = {}
        self._prompts = Prompts()
        self._engine: Engine | None = None
        self._tools: dict[str, Callable[..., object]] = {}
        self._template: Template | None = None
        self._reader: Template | None = None
        """A template of its own for the thread that makes observations: tokenizers must not be called by two
        threads at once."""
        self._reading = ThreadPoolExecutor(1, "observations")
        self._version = 0
        self._synced = False
        """False before the first sync, when the model's own weights serve as version 0."""
        self._state = WorkerState.STARTING
        self._draining = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._sync = asyncio.Lock()
        # Read once: vLLM may change it in this process.
        self._gpu_ids = os.environ.get("CUDA_VISIBLE_DEVICES", "")

    async def start(self) -> WorkerInfo:
        """Bring tokenizer, template and engine up. Raises WorkerUnavailableError where `close` came first."""
        self._tools = await asyncio.to_thread(load_tools, self._settings.tools)
        self._template = await asyncio.to_thread(self._make_template)
        self._reader = await asyncio.get_running_loop().run_in_executor(self._reading, self._make_template)
        engine = await start_engine(self._settings, self._model_path, self._seed)
        if self._state is WorkerState.FAILED:  # `close` came meanwhile, and could not know of the engine
            await engine.close()
            raise WorkerUnavailableError(f"worker {self.id} was closed while its engine started")
        self._engine = engine
        self._become(WorkerState.READY)
        return self.info()

    def _make_template(self) -> Template:
        return make_template(self._settings.template, load_tokenizer(self._model_path), self._settings)

    async def _observe(self, found: list[Hit] | str, budget: int) -> Observation:
        """An observation, made in a thread: long passages would hold up all other trajectories, and the
        answer to a ping."""
        reader = self._reader
        assert reader is not None  # a trajectory runs only after `start`
        loop = asyncio.get_running_loop()
        if isinstance(found, str):  # a tool's result; `make_template` saw to the method
            result_ids = reader.result_ids  # type: ignore[attr-defined]
            return await loop.run_in_executor(self._reading, result_ids, found, budget)
        return await loop.run_in_executor(self._reading, reader.observation_ids, found, budget)

    def info(self) -> WorkerInfo:
        """Raises WorkerLostError where the engine has died under a living worker."""
        if self._engine is not None:
            self._engine.check()
        draining = self._draining and self._state is WorkerState.READY
        state = WorkerState.DRAINING if draining else self._state
        tokens = self._running * self._settings.max_response_tokens
        return WorkerInfo(
            self.id,
            os.getpid(),
            socket.gethostname(),
            self._version,
            tokens,
            state,
            waits_for=self._waits_for(),
            hits_left_out=sum(client.left_out for client in self._clients.values()),
            gpu_ids=self._gpu_ids,
        )

    def _waits_for(self) -> str:
        if self._state is WorkerState.STARTING:
            vllm = self._settings.engine == "vllm"
            return vllm_engine.start_stage() if vllm else "loading the model"
        return "; ".join(filter(None, (client.waits() for client in self._clients.values())))

    def engine_pids(self) -> list[int]:
        """Ids of the engine's own processes."""
        return self._ready().pids()

    async def rollout(self, request: TrajectoryRequest) -> Trajectory:
        """Sample one trajectory. Raises WorkerUnavailableError, TimeoutError, RetrieverUnavailable,
        and what `run_trajectory` raises."""
        return await self._one(request, self._ready())

    @property
    def template(self) -> Template:
        """The policy's template, from `start` on."""
        self._ready()
        assert self._template is not None
        return self._template

    async def watched(
        self, request: TrajectoryRequest, watch: Watch, *, most_tokens: int | None = None
    ) -> Trajectory:
        """As `rollout`, and `watch` is told of it while it happens, on this event loop.

        most_tokens: after the prompt, documents included; beyond it the trajectory ends for `length`."""
        engine = self._ready()
        template = self.template
        settings = self._settings
        if most_tokens is not None:
            room = len(prompt_of(request.question, template, settings, self._prompts)) + most_tokens
            settings = settings.model_copy(update={"max_model_tokens": min(settings.max_model_tokens, room)})
        search = self._search(request.retriever_url or self._retriever_url)
        return await self._one(
            request,
            WatchedSampler(engine, template, watch),
            search=watched_search(search, watch),
            settings=settings,
        )

    async def rollout_batch(self, requests: list[TrajectoryRequest]) -> list[Trajectory]:
        """Sample a batch turn by turn, always in the order of the uids: the same batch and weights give the
        same bits.

        Returns trajectories in the order of `requests`. One that fails fails the batch.
        """
        engine = self._ready()
        await engine.reset_prefix_cache()  # cached keys and values would change the last bits
        # By uid, whatever the order of the requests: the place in a batch changes the last bits too.
        order = sorted(range(len(requests)), key=lambda i: requests[i].uid)
        barrier = TurnBarrier(engine, len(order))

        async def run(place: int, request: TrajectoryRequest) -> Trajectory:
            try:
                return await self._one(request, barrier.member(place))
            finally:
                # Also after an error: the others wait in each turn for all that have not left.
                barrier.leave(place)

        tasks = [asyncio.create_task(run(place, requests[i])) for place, i in enumerate(order)]
        try:
            done = dict(zip(order, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [done[i] for i in range(len(requests))]

    async def update_weights(self, update: WeightUpdate) -> int:
        """Take a whole version of the weights; sampling is held meanwhile. Returns the version now held.

        Raises WeightSyncError for a version that is not newer or not this model's, GroupMismatchError and
        GroupBrokenError before the engine is touched. Any other error, HalfWrittenError among them, leaves a
        worker that is refused by `rollout` until a whole version arrives.
        """
        engine = self._ready(failed_too=True)
        async with self._sync:
            # The same version again is taken by a worker that a failed sync left half written; and 0 by one
            # that still has the model's own weights, which are no version of the learner's.
            whole = self._synced and self._state is not WorkerState.FAILED
            if update.version < self._version or (update.version == self._version and whole):
                raise WeightSyncError(
                    f"worker {self.id} holds version {self._version} and was sent {update.version}"
                )
            before = self._state
            self._become(WorkerState.SYNCING)
            try:
                if isinstance(update.payload, Ticket):
                    problem = await self._problem(update.payload)
                    await self._load(engine.receive_weights(update.payload, self.id, problem), update.version)
                else:
                    await self._load_from_store(engine, update)
            finally:
                self._end_sync(before)  # an error from before the engine was touched changes nothing
            return self._version

    async def _load_from_store(self, engine: Engine, update: WeightUpdate) -> None:
        folder = await asyncio.to_thread(self._receiver.receive, update)
        try:
            await self._load(engine.load_weights(folder, update.version), update.version)
        finally:
            await asyncio.to_thread(self._receiver.release, folder)

    async def _load(self, loading: Awaitable[None], version: int) -> None:
        """Await the engine, and keep what it holds afterwards."""
        try:
            await loading
        except BaseException as e:
            if not untouched(e):
                self._end_sync(WorkerState.FAILED)
            raise
        self._version = version
        self._synced = True
        self._end_sync(WorkerState.READY)

    def _end_sync(self, state: WorkerState) -> None:
        if self._state is WorkerState.SYNCING:  # it has ended already, or `close` came meanwhile, otherwise
            self._become(state)

    async def _problem(self, ticket: Ticket) -> str | None:
        """Why the weights that were announced can't be this model's."""
        if ticket.weights is None:
            return None
        if self._shapes is None:
            self._shapes = await asyncio.to_thread(model_shapes, self._model_path)
        sent = {name: shape for name, _, shape in ticket.weights}
        return shape_problem(sent, *self._shapes, ticket.version)

    async def offer_weights(self, receiver: WeightsReceiver, version: int, backend: str) -> WeightUpdate:
        """Offer this worker's weights to one that joins. Raises WeightSyncError where it does not hold
        `version` whole."""
        self._ready()
        if self._version != version or self._state is not WorkerState.READY:
            raise WeightSyncError(
                f"worker {self.id} does not hold version {version} (it is {self._state}, at {self._version})"
            )
        if self._meeting_place is None:
            self._meeting_place = await asyncio.to_thread(host_store, self._sync_settings.timeout_seconds)
        return offer_loan(
            self._sync_settings, self._meeting_place, backend, f"worker {self.id}", receiver, version
        )

    async def lend_weights(self, update: WeightUpdate) -> None:
        """Send what was offered, and go on sampling. New weights that arrive meanwhile end the loan. Raises
        GroupBrokenError, GroupMismatchError."""
        await self._ready().lend_weights(update.payload)

    async def logprobs(self, token_ids: list[list[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log-prob of each token given those before it, under the weights now held; the first of each row is
        0.0."""
        return await self._ready().logprobs(token_ids, temperature)

    async def sleep(self) -> None:
        """Give the GPU to the learner. Requests that come before `wake` are an error."""
        # A worker without whole weights holds memory as well.
        await self._ready(failed_too=True).sleep()

    async def wake(self) -> None:
        """Take the GPU back."""
        await self._ready(failed_too=True).wake()

    async def stacks(self) -> str:
        """The stack of each task of this worker, for a run that makes no progress."""
        return task_stacks(asyncio.all_tasks())

    async def drain(self) -> None:
        """Take no more trajectories; returns when those that run are finished."""
        self._draining = True
        await self._idle.wait()

    async def close(self) -> None:
        """End the engine and its processes. May be called again."""
        # First of all: what comes from now on is refused, and a second call finds nothing to end.
        engine, self._engine = self._engine, None
        self._become(WorkerState.FAILED)
        if engine is not None:
            await engine.close()
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()
        self._reading.shutdown(wait=False, cancel_futures=True)

    def _become(self, state: WorkerState) -> None:
        self._state = self._state.to(state)

    def _ready(self, failed_too: bool = False) -> Engine:
        if self._engine is None or self._state is WorkerState.STARTING:
            raise WorkerUnavailableError(f"worker {self.id} is not running")
        if self._state is WorkerState.FAILED and not failed_too:
            raise WorkerUnavailableError(f"worker {self.id} holds no whole version of the weights")
        return self._engine

    async def _one(
        self,
        request: TrajectoryRequest,
        engine: Sampler,
        *,
        search: Search | None = None,
        settings: RolloutSettings | None = None,
    ) -> Trajectory:
        """search, settings: others than this worker's own."""
        if self._draining:
            raise WorkerUnavailableError(f"worker {self.id} is draining")
        template = self._template
        assert template is not None  # `_ready` has let the request in
        self._running += 1
        self._idle.clear()
        limit = self._settings.trajectory_timeout_seconds
        spans: list[Span] = []
        began = time.monotonic()
        try:
            async with asyncio.timeout(limit) as deadline:
                # Held-out questions may have a retriever of their own.
                search = search or self._search(request.retriever_url or self._retriever_url)
                trajectory = await run_trajectory(
                    request,
                    engine=TimedSampler(engine, spans),
                    template=template,
                    search=timed_search(search, spans),
                    settings=settings or self._settings,
                    observe=self._observe,
                    tools=self._tools,
                    known=self._prompts,
                )
        except TimeoutError as e:
            # A tool has a limit of its own, whose key its error names.
            late = f"not finished within rollout.trajectory_timeout_seconds={limit:g}"
            why = late if deadline.expired() else str(e) or repr(e)
            raise TimeoutError(f"trajectory {request.uid} on worker {self.id}: {why}") from e
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
        trajectory.worker = self.id
        trajectory.spans = [Span("trajectory", began, time.monotonic() - began), *spans]
        return trajectory

    def _search(self, url: str) -> Callable[[str], Awaitable[list[Hit]]]:
        if url not in self._clients:
            self._clients[url] = RetrieverClient(
                url, timeout_seconds=self._retriever_timeout_seconds, join_seconds=JOIN_SECONDS
            )
        client = self._clients[url]

        async def search(query: str) -> list[Hit]:
            failures: list[str] = []
            [hits] = await client.retrieve([query], self._settings.topk, on_failure=failures.append)
            return Found(hits, len(failures))

        return search
