"""One of two learner ranks, in a process of its own: RANK MODEL PORTFILE.

It trains a batch under each ZeRO stage, once with checkpointing from the start and once without, where one
of the two runs out of memory in a backward pass, and prints whether both ways ended with the same bits."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from learner_world import TestableRank, make_batch, make_config, same_bits

STEP = {"llds_lambda": 0.2, "answer_beta": 1.0, "lr_scale": 1.0}


def fail_once(rank: TestableRank) -> None:
    """In the second micro-batch, in the first layer's backward pass."""
    seen = 0

    def hook(_gradient):
        nonlocal seen
        seen += 1
        if seen == 2 and not rank.checkpointing:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def watch(_module, _inputs, out):
        hidden = out[0] if isinstance(out, tuple) else out
        if hidden.requires_grad:
            hidden.register_hook(hook)

    rank.engine.policy.hf.base_model.layers[0].register_forward_hook(watch)


def started(me: int, model: Path, port: Path, **learner) -> TestableRank:
    options = {"ranks": 2, "tokens_per_microbatch": 40, "lr": 1e-2, "step_timeout_seconds": 300} | learner
    rank = TestableRank(make_config(model, learner=options), model_path=str(model), reference=False, rank=me)
    if torch.distributed.is_initialized():
        rank.store = torch.distributed.distributed_c10d._get_default_store()
        rank.setup("127.0.0.1", 0)
        return rank
    if me == 0:
        whole = port.with_suffix(".part")
        whole.write_text(str(rank.host_store("127.0.0.1")))
        whole.rename(port)
    until = time.monotonic() + 300
    while not port.exists() and time.monotonic() < until:
        time.sleep(0.01)
    rank.setup("127.0.0.1", int(port.read_text()))
    return rank


def main(me: int, model: Path, port: Path) -> None:
    for failing, stage, bucket in ((0, 0, None), (1, 1, None), (0, 2, None), (1, 2, 9000)):
        ranks = [
            started(me, model, port, zero_stage=stage, gradient_checkpointing=on) for on in (True, False)
        ]
        for rank in ranks:
            if bucket:  # several reductions in a backward pass, of which some are over when it fails
                rank.engine.engine.optimizer.reduce_bucket_size = bucket
        if me == failing:
            fail_once(ranks[1])
        for seed in range(2):
            for rank in ranks:
                rank.update(make_batch(16, seed=seed), **STEP)
        same = ranks[1].checkpointing and same_bits(ranks[0].master(), ranks[1].master())
        print(
            f"stage {stage}{' in small buckets' if bucket else ''} {'same' if same else 'other'}", flush=True
        )
    for rank in ranks:
        rank.shutdown()  # threads of Gloo that outlive the interpreter end a process by SIGABRT


main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
