"""Tokens stay in vLLM's engine process until somebody needs them.

vLLM sends each sampled token of each request to the process that asked, as a message of its own with three
arrays, and reads it there in the one Python thread that all requests share. A rollout reads whole actions.
So the engine's process keeps the tokens of such a request, and sends them together: when the request ends,
when a token comes that may end one of its stop strings (which the other side decides, as before), and before
the weights get a new version, so that each token is still counted under the version that wrote it.

`install` changes `EngineCoreProc` in the process that it is called in, for requests whose `extra_args` hold
`MARK` and that want their output at the end alone. Other requests go vLLM's own way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from services.rollout.engines.tag_ids import enders, is_watched
from services.rollout.worker.tokenizer import load_tokenizer

MARK = "unspiral_hold"
_HOOKS = ("_attach_weight_version", "set_weight_version", "abort_requests", "_send_finish_outputs_to_client")
"""Methods of vLLM's class that `install` extends."""
_DONE = "unspiral_held_outputs"


class Held:
    """Output of one request that was not sent yet."""

    __slots__ = ("client", "enders", "first", "ids", "logprobs")

    def __init__(self, client: int, enders: frozenset[int]) -> None:
        self.client = client
        self.enders = enders
        self.first: Any = None
        """The first output that is held; None where nothing is."""
        self.ids: list[int] = []
        self.logprobs: list[Any] = []

    def add(self, output: Any) -> None:
        """Keep an output's tokens."""
        if self.first is None:
            self.first = output
        self.ids += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)

    def whole(self, last: Any) -> Any:
        """All that is held as one output, which ends as `last` does; nothing is held afterwards."""
        if last is not self.first:
            last.prefill_stats = self.first.prefill_stats
            last.new_token_ids = self.ids
            last.new_logprobs = joined(self.logprobs)
        self.first = None
        self.ids = []
        self.logprobs = []
        return last


def joined(parts: list[Any]) -> Any:
    """Log-probs of consecutive tokens as one; None where there are none."""
    import numpy as np

    if len(parts) < 2:
        return parts[0] if parts else None
    # Beside requests that ask for more of the likeliest tokens the rows of a step have more columns; the
    # sampled token is in the first.
    width = min(part.logprobs.shape[1] for part in parts)
    return type(parts[0])(
        np.concatenate([part.logprob_token_ids[:, :width] for part in parts]),
        np.concatenate([part.logprobs[:, :width] for part in parts]),
        np.concatenate([part.sampled_token_ranks for part in parts]),
    )


class Holder:
    """What one engine holds back."""

    def __init__(self, tokenizer_path: str) -> None:
        self._tokenizer_path = tokenizer_path
        self._tokenizer: Any = None
        self._held: dict[str, Held] = {}

    def _held_of(self, request: Any) -> Held | None:
        """A place for a request's output; None for one that is not held."""
        params = request.sampling_params
        if not wants_the_end_alone(params) or not is_watched(params):
            return None
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._tokenizer_path)
        return Held(request.client_index, enders(self._tokenizer, tuple(params.stop or ())))

    def hold(self, outputs: dict[int, Any], requests: dict[str, Any]) -> None:
        """Take out of a step's outputs, by client, what can wait. requests: those that run on."""
        for client in list(outputs):
            step = outputs[client]
            step.outputs = [kept for o in step.outputs if (kept := self._sent_now(o, requests)) is not None]
            if not (step.outputs or step.finished_requests or step.scheduler_stats):
                del outputs[client]

    def _sent_now(self, output: Any, requests: dict[str, Any]) -> Any:
        """The output with all that was held before it; None while it can wait."""
        name = output.request_id
        held = self._held.get(name)
        if held is None:
            request = requests.get(name)
            # One that ended has nothing held; neither has one that asks for something else beside its tokens.
            if request is None or output.finish_reason is not None:
                return output
            held = self._held_of(request)
            if held is None:
                return output
            self._held[name] = held
        held.add(output)
        if output.finish_reason is not None:
            del self._held[name]
            return held.whole(output)
        if held.enders.isdisjoint(output.new_token_ids):
            return None
        return held.whole(output)

    def flush(self) -> dict[int, list[Any]]:
        """All that is held, by client."""
        out: dict[int, list[Any]] = defaultdict(list)
        for held in self._held.values():
            if held.first is not None:
                last = type(held.first)(held.first.request_id, [])
                out[held.client].append(held.whole(last))
        return dict(out)

    def drop(self, names: Iterable[str]) -> None:
        """Of requests that nobody waits for any more."""
        for name in names:
            self._held.pop(name, None)


def wants_the_end_alone(params: Any) -> bool:
    """True for a marked request whose output is read once, at its end."""
    from vllm.sampling_params import RequestOutputKind

    marked = params is not None and bool(params.extra_args and params.extra_args.get(MARK))
    return marked and params.output_kind == RequestOutputKind.FINAL_ONLY and params.prompt_logprobs is None


def install() -> None:
    """For the engine that will be made in this process. May be called again. Raises RuntimeError for a vLLM
    whose engine process is another."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCoreProc

    if hasattr(EngineCoreProc, _DONE):
        return
    for name in _HOOKS:
        if not hasattr(EngineCoreProc, name):
            raise RuntimeError(f"vllm.v1.engine.core.EngineCoreProc.{name} is not in this version of vLLM")
    attach, set_version, abort, finish = (getattr(EngineCoreProc, name) for name in _HOOKS)

    def holder_of(core: Any) -> Holder:
        if not hasattr(core, _DONE + "_holder"):
            model = core.vllm_config.model_config
            setattr(core, _DONE + "_holder", Holder(str(Path(model.tokenizer or model.model))))
        return getattr(core, _DONE + "_holder")

    def attach_and_hold(core: Any, outputs: dict[int, Any]) -> None:
        attach(core, outputs)
        if outputs:
            holder_of(core).hold(outputs, core.scheduler.requests)

    def set_after_flush(core: Any, weight_version: str) -> None:
        for client, outputs in holder_of(core).flush().items():
            sent = EngineCoreOutputs(outputs=outputs, weight_version=core.get_weight_version())
            core.output_queue.put_nowait((client, sent))
        set_version(core, weight_version)

    def abort_and_drop(core: Any, request_ids: list[str]) -> None:
        abort(core, request_ids)
        holder_of(core).drop(request_ids)

    def finish_and_drop(core: Any, req_ids: list[str], *args: Any, **kwargs: Any) -> None:
        finish(core, req_ids, *args, **kwargs)
        holder_of(core).drop(req_ids)

    for name, extended in zip(
        _HOOKS, (attach_and_hold, set_after_flush, abort_and_drop, finish_and_drop), strict=True
    ):
        setattr(EngineCoreProc, name, extended)
    setattr(EngineCoreProc, _DONE, True)
