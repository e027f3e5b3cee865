"""How vLLM is asked for the log-probs of given tokens."""

from __future__ import annotations

from functools import partial
from typing import Any


def scoring_requests(row: list[int], temperature: float) -> list[tuple[list[int], Any]]:
    """Requests that score a row. vLLM scores a whole prompt only at temperature 1; at others each token is
    asked for by itself, through the sampler's own path (the prefix cache holds the rest)."""
    from vllm import SamplingParams

    # Each request's own, so vLLM need not copy it.
    asked = partial(SamplingParams, max_tokens=1, detokenize=False, skip_clone=True)
    if temperature == 1.0:
        return [(row, asked(temperature=1.0, prompt_logprobs=0))]
    return [(row[:t], asked(temperature=temperature, logprob_token_ids=[row[t]])) for t in range(1, len(row))]


def scores(row: list[int], temperature: float, outputs: list[Any]) -> list[float]:
    """Log-probs of a row from the outputs of its `scoring_requests`."""
    if temperature == 1.0:
        return [
            0.0,
            *(p[token].logprob for p, token in zip(outputs[0].prompt_logprobs[1:], row[1:], strict=True)),
        ]
    return [
        0.0,
        *(o.outputs[0].logprobs[0][token].logprob for o, token in zip(outputs, row[1:], strict=True)),
    ]
