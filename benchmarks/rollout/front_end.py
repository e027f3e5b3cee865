"""What vLLM's front end costs for each sampled token: its own way, and ours (ids watched for tags, log-probs
as numbers), in turns, without a model.

    python -m benchmarks.rollout.front_end --tokenizer DIR [--rows 256] [--tokens 200] [--rounds 10]

Random ids of the tokenizer come as an engine would send them, one a request and step. Prints processor time
per token of either way, and of the pairs the ratio; a first pair, which fills caches, is left out.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import numpy as np

from services.rollout.engines import vllm_front_end
from services.rollout.worker.tokenizer import load_tokenizer

STOPS = ["</search>", "</answer>"]


def requests(rows: int, tokens: int, ours: bool) -> list[Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreRequest

    params = SamplingParams(
        max_tokens=tokens + 1,
        stop=STOPS,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={vllm_front_end.MARK: True} if ours else None,
    )
    return [
        EngineCoreRequest(f"r{i}", [1, 2], None, params, None, 0.0, None, None, None, external_req_id=f"r{i}")
        for i in range(rows)
    ]


def seconds_per_token(tokenizer: Any, rows: int, tokens: int, ours: bool, seed: int) -> float:
    """Processor time, of the output processor alone."""
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.outputs import LogprobsLists

    processor = OutputProcessor(tokenizer, log_stats=False)
    for request in requests(rows, tokens, ours):
        processor.add_request(request, None)
    chance = random.Random(seed)
    words = [i for token, i in tokenizer.get_vocab().items() if ">" not in token and i > 2]
    steps = []
    for _ in range(tokens):
        ids = [chance.choice(words) for _ in range(rows)]
        steps.append(
            [
                EngineCoreOutput(
                    request_id=f"r{i}",
                    new_token_ids=[token],
                    new_logprobs=LogprobsLists(
                        np.array([[token]]), np.array([[-1.5]], np.float32), np.array([1])
                    ),
                )
                for i, token in enumerate(ids)
            ]
        )
    began = time.process_time()
    for step in steps:
        processor.process_outputs(step)
    return (time.process_time() - began) / (rows * tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", required=True, help="folder of a model")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    from vllm.tokenizers import get_tokenizer

    vllm_front_end.install()
    load_tokenizer(args.tokenizer)  # says what is wrong with the folder, if anything is
    tokenizer = get_tokenizer(args.tokenizer)
    pairs = [
        tuple(
            1e6 * seconds_per_token(tokenizer, args.rows, args.tokens, ours, seed) for ours in (False, True)
        )
        for seed in range(args.rounds + 1)
    ][1:]
    for name, values in zip(("vLLM's own", "ours"), zip(*pairs, strict=True), strict=True):
        print(
            f"{name:11} {statistics.median(values):6.1f} us a token ({min(values):.1f} to {max(values):.1f})"
        )
    ratios = [own / ours for own, ours in pairs]
    print(f"ratio       {statistics.median(ratios):6.1f} ({min(ratios):.1f} to {max(ratios):.1f})")


if __name__ == "__main__":
    main()
