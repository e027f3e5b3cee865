"""What each sampled token costs on its way from vLLM's engine process to a rollout, without a model: vLLM's
own way; ids watched for tags and log-probs as numbers; and the same with tokens held back in the engine's
process until an action ends. The ways take turns.

    python -m benchmarks.rollout.front_end --tokenizer DIR [--rows 256] [--tokens 200] [--rounds 10]

Random ids of the tokenizer come as an engine would send them, one per request and step, through vLLM's own
serialisation. Prints processor time per token of either process (holding and writing messages in the
engine's; reading them and all that follows in the other, in the thread that all requests share), and the
ratios within rounds; a first round, which fills caches, is left out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.gpu.machine import machine
from services.rollout.engines import tag_ids, vllm_front_end, vllm_held_outputs
from services.rollout.worker.tokenizer import load_tokenizer

STOPS = ["</search>", "</answer>"]
WAYS: dict[str, dict[str, bool] | None] = {
    "vLLM's own": None,
    "ids": {tag_ids.MARK: True},
    "held": {tag_ids.MARK: True, vllm_held_outputs.MARK: True},
}
"""`extra_args` of a request by way."""


def requests(rows: int, tokens: int, way: str) -> list[Any]:
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
        extra_args=WAYS[way],
    )
    return [
        EngineCoreRequest(f"r{i}", [1, 2], None, params, None, 0.0, None, None, None, external_req_id=f"r{i}")
        for i in range(rows)
    ]


def seconds_per_token(
    tokenizer: Any, path: str, rows: int, tokens: int, way: str, seed: int
) -> tuple[float, float]:
    """Processor time in the engine's process and in the other. path: of the tokenizer's folder."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    processor = OutputProcessor(tokenizer, log_stats=False)
    asked = requests(rows, tokens, way)
    for request in asked:
        processor.add_request(request, None)
    running = {
        r.request_id: SimpleNamespace(sampling_params=r.sampling_params, client_index=0) for r in asked
    }
    holder = vllm_held_outputs.Holder(path)
    holder.hold(
        {0: EngineCoreOutputs(outputs=[EngineCoreOutput(asked[0].request_id, [])])}, running
    )  # reads the tokenizer
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    chance = random.Random(seed)
    words = [i for token, i in tokenizer.get_vocab().items() if ">" not in token and i > 2]
    engine = front = 0.0
    for number in range(tokens):
        ids = [chance.choice(words) for _ in range(rows)]
        logprobs = LogprobsLists(
            np.array(ids)[:, None], np.full((rows, 1), -1.5, np.float32), np.ones(rows, np.int64)
        )
        last = number == tokens - 1
        step = {
            0: EngineCoreOutputs(
                outputs=[
                    EngineCoreOutput(
                        request_id=f"r{i}",
                        new_token_ids=[token],
                        new_logprobs=logprobs.slice_request(i, 1),
                        finish_reason=FinishReason.LENGTH if last else None,
                    )
                    for i, token in enumerate(ids)
                ]
            )
        }
        began = time.process_time()
        holder.hold(step, running)
        sent = [encoder.encode(outputs) for outputs in step.values()]
        between = time.process_time()
        for message in sent:
            processor.process_outputs(decoder.decode(message).outputs)
        engine += between - began
        front += time.process_time() - between
    assert not processor.request_states, "each request ended"
    return engine / (rows * tokens), front / (rows * tokens)


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):6.2f} ({min(values):.2f} to {max(values):.2f})"


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
    engine: dict[str, list[float]] = {way: [] for way in WAYS}
    front: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(args.rounds + 1):
        for way in WAYS:
            costs = seconds_per_token(tokenizer, args.tokenizer, args.rows, args.tokens, way, number)
            if number:
                engine[way].append(1e6 * costs[0])
                front[way].append(1e6 * costs[1])
    first = next(iter(WAYS))
    print(json.dumps(machine() | {"engine_us": engine, "front_us": front}))
    print(f"{'us a token':11} {'engine process':28} {'front end':28} {'own front end / this':28}")
    for way in WAYS:
        ratios = [a / b for a, b in zip(front[first], front[way], strict=True)]
        print(f"{way:11} {shown(engine[way]):28} {shown(front[way]):28} {shown(ratios)}")


if __name__ == "__main__":
    main()
