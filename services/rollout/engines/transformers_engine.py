"""A small, slow engine on plain transformers, for machines without vLLM. Same protocol, same log-probs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.common.loading.no_bars import without_bars
from services.common.loading.quick_transformers import skip_scikit_learn
from services.rollout.engines.base import (
    Finish,
    GenerateCall,
    Generation,
    Waiting,
    check_all_loaded,
    check_may_serve,
    generate_together,
)
from services.rollout.engines.own_thread import OwnThread, on_this_loop
from services.rollout.worker.tokenizer import load_tokenizer
from services.weight_sync.broadcast import Outcome, WeightLender, WeightReceiver, listed, loan_ended

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from services.settings import RolloutSettings
    from services.weight_sync.group import Ticket

_TAIL = 32
"""Newest tokens in which a stop string is looked for."""


@dataclass
class _Row:
    """One call of a batch, and what was sampled for it."""

    call: GenerateCall
    generator: torch.Generator
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None


class TransformersEngine(OwnThread):
    """Calls that wait at the same moment are sampled together, as one left-padded batch; those that come
    later join the next."""

    def __init__(self, model: Any, tokenizer: Any, thread: ThreadPoolExecutor, seed: int):
        import torch

        super().__init__(thread)
        self._model = model
        self._tokenizer = tokenizer
        self._random = torch.Generator(model.device).manual_seed(seed)
        eos = getattr(model.generation_config, "eos_token_id", None) or model.config.eos_token_id
        self._eos = set(eos if isinstance(eos, list) else [eos])
        self._receiver = WeightReceiver()
        self._lender = WeightLender()
        self._waiting: list[Waiting] = []
        self._loop: asyncio.Task | None = None

    @classmethod
    async def start(cls, model_path: str, settings: RolloutSettings, seed: int) -> TransformersEngine:
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="transformers")

        def build() -> TransformersEngine:
            skip_scikit_learn()
            import torch
            from transformers import AutoModelForCausalLM

            device = "cuda" if torch.cuda.is_available() else "cpu"
            dtype = {"auto": "float32" if device == "cpu" else "bfloat16"}.get(settings.dtype, settings.dtype)
            with without_bars():
                model = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype))
            model = model.to(device).eval()
            return cls(model, load_tokenizer(model_path), thread, seed)

        return await asyncio.get_running_loop().run_in_executor(thread, build)

    async def generate(self, call: GenerateCall) -> Generation:
        call = replace(call, on_tokens=on_this_loop(call.on_tokens))
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((call, done))
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._serve())
        return await done

    async def _serve(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # others of the same moment may still come
            batch, self._waiting = self._waiting, []
            await generate_together(self.generate_batch, batch)

    async def generate_batch(self, calls: Sequence[GenerateCall]) -> list[Generation]:
        return await self._call(self._sample, list(calls))

    def _sample(self, calls: list[GenerateCall]) -> list[Generation]:
        import torch

        check_may_serve(self._usable, self._asleep)
        device = self._model.device
        rows = [_Row(call, self._generator(call)) for call in calls]
        width = max(len(call.token_ids) for call in calls)
        # On the left: the newest token of every row is then in the last column.
        padding = [width - len(call.token_ids) for call in calls]
        tokens = torch.tensor(
            [[0] * n + list(call.token_ids) for n, call in zip(padding, calls, strict=True)], device=device
        )
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding], device=device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = None
        with torch.inference_mode():
            # A row that has ended goes on, unrecorded, until all have: the batch keeps its shape.
            while any(row.finish is None for row in rows):
                out = self._model(
                    input_ids=tokens,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                )
                cache = out.past_key_values
                logits = _at_least_float32(out.logits[:, -1])
                chosen = [self._next(row, logits[i]) for i, row in enumerate(rows)]
                tokens = torch.tensor(chosen, device=device)[:, None]
                mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
                positions = positions[:, -1:] + 1
        return [
            Generation(row.ids, row.logprobs, self._decode(row.ids), row.finish or "length", self._version)
            for row in rows
        ]

    def _generator(self, call: GenerateCall) -> torch.Generator:
        """The noise of one call: its own where it has a seed; otherwise the engine's."""
        import torch

        if call.seed is None:
            return self._random
        return torch.Generator(self._model.device).manual_seed(call.seed)

    def _next(self, row: _Row, logits: Tensor) -> int:
        """Sample a row's next token from float32 or float64 logits [V]."""
        import torch

        call = row.call
        logp = (logits / (call.temperature or 1.0)).log_softmax(-1)
        if call.temperature > 0:
            token = int(torch.multinomial(logp.exp(), 1, generator=row.generator))
        else:
            token = int(logp.argmax())
        if row.finish is None:
            row.ids.append(token)
            row.logprobs.append(float(logp[token]))
            row.finish = self._finish(row.ids, call)
            if call.on_tokens is not None:
                call.on_tokens(list(row.ids))
        return token

    def _finish(self, ids: list[int], call: GenerateCall) -> Finish | None:
        if ids[-1] in self._eos:
            return "eos"
        tail = self._decode(ids[-_TAIL:])
        if any(s in tail for s in call.stop):
            return "stop"
        return "length" if len(ids) >= call.max_tokens else None

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    async def logprobs(self, token_ids: list[list[int]], temperature: float) -> list[list[float]]:
        return await self._call(self._score, token_ids, temperature)

    def _score(self, rows: list[list[int]], temperature: float) -> list[list[float]]:
        import torch

        scores = []
        with torch.inference_mode():
            for row in rows:
                ids = torch.tensor([row], device=self._model.device)
                logits = _at_least_float32(self._model(ids).logits[0, :-1])
                logp = (logits / temperature).log_softmax(-1)
                scores.append([0.0, *logp.gather(1, ids[0, 1:, None])[:, 0].tolist()])
        return scores

    async def load_weights(self, path: Path, version: int) -> None:
        await self._replace(version, lambda: self._load(path))

    def _load(self, folder: Path) -> None:
        from safetensors.torch import load_file

        state = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            state.update(load_file(file))
        self._model.load_state_dict(state, strict=False)
        check_all_loaded(dict(self._model.named_parameters()), state)

    async def sleep(self) -> None:
        """It runs on the CPU and has nothing to give free, but keeps to its turn."""
        self._asleep = True

    async def wake(self) -> None:
        self._asleep = False

    async def receive_weights(self, ticket: Ticket, worker: str, problem: str | None) -> None:
        # In a thread: it waits for the one that reads the weights, which must not change under it.
        await asyncio.to_thread(self._lender.stop)
        await self._replace(ticket.version, lambda: self._receive(ticket, worker, problem))

    def _receive(self, ticket: Ticket, worker: str, problem: str | None) -> None:
        import torch

        own = dict(self._model.named_parameters())
        taken: set[str] = set()

        def load(items: list[tuple[str, Tensor]]) -> None:
            with torch.no_grad():
                for name, tensor in items:
                    own[name].copy_(tensor)
            taken.update(name for name, _ in items)

        self._receiver.receive(
            ticket,
            worker,
            0,
            device=self._model.device,
            load=load,
            load_raw=load,
            own=listed(own.items()),
            problem=problem,
        )
        check_all_loaded(own, taken)

    async def lend_weights(self, ticket: Ticket) -> None:
        self._lender.start(
            ticket, 0, device=self._model.device, parameters=lambda: list(self._model.named_parameters())
        )

        async def outcomes() -> list[Outcome | None]:
            return [self._lender.outcome()]

        await loan_ended(outcomes)

    async def reset_prefix_cache(self) -> None:
        """Nothing is kept between calls."""

    def check(self) -> None:
        """It lives and dies with this process."""

    def pids(self) -> list[int]:
        return []

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _at_least_float32(logits: Tensor) -> Tensor:
    """Half-precision logits are widened before the softmax; those of a float64 model stay as they are."""
    return logits if logits.element_size() == 8 else logits.float()
