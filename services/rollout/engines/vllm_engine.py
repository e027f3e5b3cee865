"""The vLLM engines, on CPU and GPU alike.

`VllmEngine` is vLLM's asynchronous engine: requests join and leave the running batch at any time.
`LockstepVllmEngine` is the same model and scheduler inside this process, stepped by hand: what is in a batch
then depends on nothing but the calls, so the same calls give the same bits. The asynchronous engine can't
promise that: it notices a stop string one message late, so a finished request may share one more batch with
the others or not, and the shape of a batch changes the last bits of a matrix product.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from services.common.errors import UnspiralError
from services.common.loading.quick_transformers import skip_scikit_learn
from services.rollout.engines import engine_process
from services.rollout.engines.base import Finish, GenerateCall, Generation, OnTokens, check_may_serve
from services.rollout.engines.own_thread import OwnThread, on_this_loop
from services.rollout.engines.owner import OWNER_VARIABLE
from services.rollout.engines.vllm_scoring import scores, scoring_requests
from services.rollout.errors import WorkerLostError, WorkerUnavailableError
from services.settings import CPU_CACHE_GIB
from services.weight_sync.base import WeightSyncError, untouched
from services.weight_sync.broadcast import loan_ended, raise_failed

if TYPE_CHECKING:
    from services.settings import RolloutSettings
    from services.weight_sync.group import Ticket

FRONT_END = "services.rollout.engines.vllm_front_end"
"""Module of what vLLM's front end does for our requests. It imports vLLM."""
IDS_ONLY = {"unspiral_ids_only": True, "unspiral_hold": True}
"""`extra_args` of requests that the front end treats so, and whose tokens the engine's process holds back."""
WORKER_EXTENSION = "services.rollout.engines.vllm_worker_extension"
"""Module of the class that vLLM mixes into its worker."""
ENVIRONMENT = {
    # Without these a tiny model on CPU is several times slower: vLLM would bind and oversubscribe the cores.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # The model runs in the engine's own process. (vLLM's CPU build puts a further process between them where
    # this is 1.)
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}
"""Set before vLLM is imported, unless already set."""


def start_stage() -> str:
    """How far the start of an engine in this process has come."""
    # The last modules of vLLM that either engine imports.
    last = (("async_llm", "AsyncLLM"), ("llm_engine", "LLMEngine"))
    imported = any(hasattr(sys.modules.get(f"vllm.v1.engine.{module}"), name) for module, name in last)
    return "loading the model into vLLM" if imported else "importing vLLM"


def _arguments(settings: RolloutSettings, model_path: str, seed: int) -> dict[str, Any]:
    from vllm.platforms import current_platform

    # It imports vLLM, and changes it: that must hold in this process too, before a model is made.
    importlib.import_module(WORKER_EXTENSION)
    importlib.import_module(FRONT_END).install()
    on_cpu = current_platform.is_cpu()
    dtype = {"auto": "float32" if on_cpu else "bfloat16"}.get(settings.dtype, settings.dtype)
    if on_cpu:
        device: dict[str, Any] = {
            "enforce_eager": True,
            "kv_cache_memory_bytes": int((settings.kv_cache_gib or CPU_CACHE_GIB) * 2**30),
            "block_size": 32,
            # A prompt split over steps crashes vLLM's CPU sampler when the request has a seed of its own.
            "enable_chunked_prefill": False,
        }
    else:
        device = {
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "enable_sleep_mode": settings.share_gpus,
            "enforce_eager": settings.compile == "off",
            # The largest batch of decoding that vLLM captures as a graph. Its own default would be 128 here.
            "max_num_seqs": 512,
        }
        if settings.kv_cache_gib is not None:
            device["kv_cache_memory_bytes"] = int(settings.kv_cache_gib * 2**30)
        if settings.compile == "graphs":
            # Graphs of decoding alone, without torch.compile, which takes a minute at each start.
            device["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return {
        "model": model_path,
        "tokenizer_mode": "hf",
        "dtype": dtype,
        "seed": seed % 2**31,
        "max_model_len": settings.max_model_tokens,
        "max_num_batched_tokens": max(8192, settings.max_model_tokens),
        "enable_prefix_caching": True,
        # Of the distribution that was sampled from, after the temperature: the learner divides by it too.
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": settings.tensor_parallel,
        # Inside a Ray actor vLLM would have Ray place the parts, on GPUs of which this worker holds all
        # already.
        "distributed_executor_backend": "uni" if settings.tensor_parallel == 1 else "mp",
        "worker_extension_cls": f"{WORKER_EXTENSION}.WorkerExtension",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "hf_overrides": {} if settings.head_dtype == "model" else {"head_dtype": settings.head_dtype},
        **device,
    }


def _can_sleep(llm: Any) -> bool:
    """True where the engine was built to free its memory: on GPU, with `rollout.share_gpus`."""
    return bool(llm.vllm_config.model_config.enable_sleep_mode)


def _sampling(call: GenerateCall) -> Any:
    """vLLM's SamplingParams of a call."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=call.max_tokens,
        temperature=call.temperature,
        seed=call.seed,
        stop=list(call.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=0,  # the sampled token's own, and no other
        flat_logprobs=True,
        extra_args=dict(IDS_ONLY),
        skip_clone=True,  # made for this call alone: vLLM would copy it deeply, in the thread of all requests
        output_kind=RequestOutputKind.CUMULATIVE if call.on_tokens else RequestOutputKind.FINAL_ONLY,
    )


def _generation(request_id: str, output: Any, version: int | None = None) -> Generation:
    """One finished request as a Generation. Log-probs are looked up by token id: a list by rank may begin
    with another token. `version` None: the oldest that vLLM has noted."""
    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        raise WorkerUnavailableError(f"request {request_id}: vLLM ended it with {completion.finish_reason!r}")
    ids = list(completion.token_ids)
    if isinstance(completion.logprobs, list) and isinstance(completion.logprobs[0], float):
        logprobs = list(completion.logprobs)
    else:
        logprobs = [position[token].logprob for position, token in zip(completion.logprobs, ids, strict=True)]
    finish: Finish = "eos"
    if completion.finish_reason == "length":
        finish = "length"
    elif isinstance(completion.stop_reason, str):
        finish = "stop"
    if version is None:
        version = min(int(span.version) for span in completion.weight_versions)
    return Generation(ids, logprobs, completion.text, finish, version)


class VllmEngine:
    """`vllm.v1.engine.async_llm.AsyncLLM` behind the engine protocol; the model lives in a process of its
    own."""

    def __init__(self, llm: Any, start: engine_process.Start[Any]):
        self._llm = llm
        self._start = start
        self._processes = start.processes()
        self._usable = True
        self._asleep = False
        self._scored = 0

    @classmethod
    async def start(cls, model_path: str, settings: RolloutSettings, seed: int) -> VllmEngine:
        """Start the engine's process and load the model; takes 10 to 40 s."""
        os.environ[OWNER_VARIABLE] = str(os.getpid())

        def build(start: engine_process.Start[Any]) -> Any:
            skip_scikit_learn()
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            engine_process.install()
            arguments = AsyncEngineArgs(**_arguments(settings, model_path, seed))
            start.check()
            return AsyncLLM.from_engine_args(arguments)

        start = engine_process.Start(build)
        llm = await start.result()
        engine = cls(llm, start)
        await llm.update_weight_version("0")
        return engine

    async def generate(self, call: GenerateCall) -> Generation:
        output = await self._finished(call.request_id, call.token_ids, _sampling(call), call.on_tokens)
        return _generation(call.request_id, output)

    async def generate_batch(self, calls: Sequence[GenerateCall]) -> list[Generation]:
        return list(await asyncio.gather(*map(self.generate, calls)))

    async def _finished(
        self, request_id: str, token_ids: list[int], sampling: Any, on_tokens: OnTokens | None = None
    ) -> Any:
        """vLLM's output of a request, once it is finished."""
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDead

        check_may_serve(self._usable, self._asleep)
        try:
            async for output in self._llm.generate({"prompt_token_ids": token_ids}, sampling, request_id):
                if on_tokens is not None:
                    on_tokens(list(output.outputs[0].token_ids))
                if output.finished:
                    return output
        except VllmDead as e:
            raise WorkerLostError("vLLM's engine process is dead") from e
        raise WorkerUnavailableError(f"request {request_id}: vLLM ended it without an output")

    async def logprobs(self, token_ids: list[list[int]], temperature: float) -> list[list[float]]:
        async def score(row: list[int]) -> list[float]:
            self._scored += 1
            name = f"score-{self._scored}"
            requests = scoring_requests(row, temperature)
            outputs = await asyncio.gather(
                *(self._finished(f"{name}-{i}", ids, params) for i, (ids, params) in enumerate(requests))
            )
            return scores(row, temperature, outputs)

        return list(await asyncio.gather(*map(score, token_ids)))

    async def load_weights(self, path: Path, version: int) -> None:
        async with self._replacing(version):
            await self._llm.collective_rpc("unspiral_load_weights", args=(str(path),))

    async def receive_weights(self, ticket: Ticket, worker: str, problem: str | None) -> None:
        async with self._replacing(ticket.version):
            raise_failed(
                await self._llm.collective_rpc(
                    "unspiral_receive_weights", args=(ticket.to_json(), worker, problem)
                )
            )

    @asynccontextmanager
    async def _replacing(self, version: int) -> AsyncIterator[None]:
        """Hold sampling while the weights change. Requests that run are kept, unless the engine is left half
        written."""
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        try:
            yield
            # Requests that run on are computed again from their ids, under the new weights.
            if not await self._llm.reset_prefix_cache(reset_running_requests=True):
                raise RuntimeError("vLLM refused to empty its prefix cache")
            await self._llm.update_weight_version(str(version))
        except BaseException as e:
            if untouched(e):
                if self._usable:
                    await self._llm.resume_generation()
                raise
            self._usable = False
            # Requests that run would go on with half of two versions.
            await self._llm.pause_generation(mode="abort", clear_cache=False)
            if isinstance(e, WeightSyncError):
                raise
            raise UnspiralError(f"weights of version {version} were not loaded whole: {e}") from e
        self._usable = True
        await self._llm.resume_generation()

    async def sleep(self) -> None:
        self._asleep = True
        if _can_sleep(self._llm):
            await self._llm.sleep(level=1)

    async def wake(self) -> None:
        if _can_sleep(self._llm):
            await self._llm.wake_up()
        self._asleep = False

    async def lend_weights(self, ticket: Ticket) -> None:
        await self._llm.collective_rpc("unspiral_lend_weights", args=(ticket.to_json(),))
        await loan_ended(lambda: self._llm.collective_rpc("unspiral_lend_outcome"))

    async def reset_prefix_cache(self) -> None:
        if not await self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM refused to empty its prefix cache: requests are running")

    def check(self) -> None:
        if self._llm is not None and self._llm.errored:
            raise WorkerLostError("vLLM's engine process is dead")

    def pids(self) -> list[int]:
        return [p.pid for p in self._processes]

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is None:
            return
        if (outputs := llm.output_handler) is not None:
            outputs.cancel()  # it would log the end of the engine's process as a failure, with a traceback
        await asyncio.to_thread(llm.shutdown, 1.0)
        # Its `__del__` calls it once more, at the interpreter's exit even, where that fails and says so.
        llm.shutdown = lambda *_: None
        for process in psutil.wait_procs(self._processes, timeout=2)[1]:
            process.kill()
        self._start.end()


class LockstepVllmEngine(OwnThread):
    """vLLM's engine in this process, stepped by one thread. `generate_batch` adds all requests before the
    first step."""

    def __init__(self, llm: Any, thread: ThreadPoolExecutor):
        super().__init__(thread)
        self._llm = llm
        self._count = 0

    @classmethod
    async def start(cls, model_path: str, settings: RolloutSettings, seed: int) -> LockstepVllmEngine:
        """Load the model; takes 5 to 20 s."""
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm")

        def build() -> Any:
            skip_scikit_learn()
            from vllm import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            return LLMEngine.from_engine_args(
                EngineArgs(**_arguments(settings, model_path, seed)), enable_multiprocessing=False
            )

        return cls(await asyncio.get_running_loop().run_in_executor(thread, build), thread)

    def _run(
        self, requests: list[tuple[list[int], Any]], on_tokens: Sequence[OnTokens | None] = ()
    ) -> list[Any]:
        """Outputs of ids with their SamplingParams, in order: all are added before the first step.
        on_tokens: of each request; none to tell nobody."""
        check_may_serve(self._usable, self._asleep)
        names: list[str] = []
        for ids, params in requests:
            self._count += 1
            names.append(str(self._count))
            self._llm.add_request(names[-1], {"prompt_token_ids": ids}, params)
        told = dict(zip(names, on_tokens, strict=False))
        finished: dict[str, Any] = {}
        while self._llm.has_unfinished_requests():
            for output in self._llm.step():
                if tell := told.get(output.request_id):
                    tell(list(output.outputs[0].token_ids))
                if output.finished:
                    finished[output.request_id] = output
        return [finished[name] for name in names]

    async def generate(self, call: GenerateCall) -> Generation:
        return (await self.generate_batch([replace(call, on_tokens=on_this_loop(call.on_tokens))]))[0]

    async def generate_batch(self, calls: Sequence[GenerateCall]) -> list[Generation]:
        requests = [(call.token_ids, _sampling(call)) for call in calls]
        on_tokens = [call.on_tokens for call in calls]
        outputs, version = await self._call(lambda: (self._run(requests, on_tokens), self._version))
        return [
            _generation(call.request_id, output, version) for call, output in zip(calls, outputs, strict=True)
        ]

    async def logprobs(self, token_ids: list[list[int]], temperature: float) -> list[list[float]]:
        groups = [scoring_requests(row, temperature) for row in token_ids]
        outputs = iter(await self._call(self._run, [request for group in groups for request in group]))
        return [
            scores(row, temperature, [next(outputs) for _ in group])
            for row, group in zip(token_ids, groups, strict=True)
        ]

    async def load_weights(self, path: Path, version: int) -> None:
        await self._replace(
            version, lambda: self._llm.collective_rpc("unspiral_load_weights", args=(str(path),))
        )

    async def receive_weights(self, ticket: Ticket, worker: str, problem: str | None) -> None:
        arguments = (ticket.to_json(), worker, problem)
        await self._replace(
            ticket.version,
            lambda: raise_failed(self._llm.collective_rpc("unspiral_receive_weights", args=arguments)),
        )

    async def _replace(self, version: int, load: Callable[[], Any]) -> None:
        def whole() -> None:
            load()
            self._empty_prefix_cache()

        await super()._replace(version, whole)

    async def sleep(self) -> None:
        self._asleep = True
        if _can_sleep(self._llm):
            await self._call(self._llm.sleep, 1)

    async def wake(self) -> None:
        if _can_sleep(self._llm):
            await self._call(self._llm.wake_up)
        self._asleep = False

    async def lend_weights(self, ticket: Ticket) -> None:
        await self._call(lambda: self._llm.collective_rpc("unspiral_lend_weights", args=(ticket.to_json(),)))
        await loan_ended(lambda: self._call(lambda: self._llm.collective_rpc("unspiral_lend_outcome")))

    async def reset_prefix_cache(self) -> None:
        await self._call(self._empty_prefix_cache)

    def _empty_prefix_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM refused to empty its prefix cache")

    def check(self) -> None:
        """It lives and dies with this process."""

    def pids(self) -> list[int]:
        return []

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is None:
            return
        await self._call(llm.engine_core.shutdown)
        self._thread.shutdown(wait=False)
