"""vLLM's front end, without work that a rollout has no use for.

vLLM turns each sampled token into text twice, once to look for stop strings and once beside its log-prob, in
the one Python thread that all requests of an engine share. Here a token's id alone tells whether it can end a
stop string; only then are the last few tokens decoded. Log-probs stay numbers. The same requests stop at the
same tokens, with the same log-probs.

`install` puts two classes in vLLM's place for requests whose `extra_args` hold the mark of `tag_ids`; other
requests, and stop strings whose last character a tokenizer may spell in another way, go vLLM's own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.engine import output_processor
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor

from services.rollout.engines.tag_ids import enders, is_watched
from services.rollout.worker.tokenizer import decoder_of

SPARE_TOKENS = 8
"""Tokens decoded beyond the length of the longest stop string: some have no text."""


class TagWatcher(IncrementalDetokenizer):
    """Ids of a request, watched for its stop strings. Text is made once, at the end."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        super().__init__()
        self._decoded = decoder_of(tokenizer)
        self._stops = tuple(stops)
        self._enders = enders(tokenizer, self._stops)
        self._tail = max(map(len, self._stops), default=0) + SPARE_TOKENS
        self._ended_by: str | None = None

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """The stop string that the new tokens end. Those after it are left out."""
        for token in new_token_ids:
            self.token_ids.append(token)
            if token in self._enders:
                text = self._decoded(self.token_ids[-self._tail :])
                self._ended_by = next((stop for stop in self._stops if stop in text), None)
                if self._ended_by is not None:
                    return self._ended_by
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """The whole text, up to the end of the stop string, of a finished request; otherwise nothing."""
        if not finished:
            return ""
        text = self._decoded(self.token_ids)
        if self._ended_by is None:
            return text
        return text[: text.index(self._ended_by) + len(self._ended_by)]


class SampledLogprobs(list[float]):
    """Log-probs of the sampled tokens, in order."""


class SampledOnly(LogprobsProcessor):
    """Log-probs of the sampled tokens as plain numbers, without ranks, texts and other tokens."""

    def update_from_output(self, output: Any) -> None:
        lists = output.new_logprobs
        if lists is None:
            return
        for token, ids, values in zip(
            output.new_token_ids, lists.logprob_token_ids, lists.logprobs, strict=True
        ):
            # The sampler puts the sampled token first; by its id it is found wherever it is.
            at = 0 if ids[0] == token else ids.tolist().index(token)
            self.logprobs.append(float(values[at]))


class _Detokenizers:
    """In the place of vLLM's class, of which its output processor uses this alone."""

    @staticmethod
    def from_new_request(tokenizer: Any, request: Any) -> IncrementalDetokenizer:
        params = request.sampling_params
        if tokenizer is not None and is_watched(params):
            return TagWatcher(tokenizer, params.stop or [])
        return IncrementalDetokenizer.from_new_request(tokenizer, request)


class _Logprobs:
    """As `_Detokenizers`."""

    @staticmethod
    def from_new_request(tokenizer: Any, request: Any) -> LogprobsProcessor:
        params = request.sampling_params
        if is_watched(params) and params.logprobs == 0 and params.prompt_logprobs is None:
            return SampledOnly(
                tokenizer=None,
                logprobs=SampledLogprobs(),
                prompt_logprobs=None,
                cumulative_logprob=None,
                num_logprobs=0,
                num_prompt_logprobs=None,
            )
        return LogprobsProcessor.from_new_request(tokenizer, request)


def install() -> None:
    """For engines that are made in this process from now on. May be called again. Raises RuntimeError for a
    vLLM whose output processor is another."""
    for name in ("IncrementalDetokenizer", "LogprobsProcessor"):
        if not hasattr(output_processor, name):
            raise RuntimeError(f"vllm.v1.engine.output_processor.{name} is not in this version of vLLM")
    output_processor.IncrementalDetokenizer = _Detokenizers
    output_processor.LogprobsProcessor = _Logprobs
