"""Weights through Ray's object store: our buckets against the safetensors library's `save`, CRC-32, and one
file after the other.

    python -m benchmarks.rollout.shared_memory --mib 1024

Both ways take turns in one run, with the publisher and one receiver in this process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import ray
import torch
from safetensors.torch import save

from services.local_ray import start_local_ray
from services.weight_sync import shared_memory
from services.weight_sync.shared_memory import SharedMemoryPublisher, SharedMemoryReceiver

BUCKET_MIB = 256


def library_publish(weights: list[tuple[str, torch.Tensor]]) -> list[tuple[object, int]]:
    out, waiting, size = [], {}, 0
    for name, tensor in [*weights, ("", None)]:
        if waiting and (tensor is None or size + tensor.nbytes > BUCKET_MIB * 2**20):
            blob = save(waiting)
            out.append((ray.put(np.frombuffer(blob, np.uint8)), zlib.crc32(blob)))
            waiting, size = {}, 0
        if tensor is not None:
            waiting[name] = tensor.to("cpu", copy=True)
            size += tensor.nbytes
    return out


def library_receive(buckets: list[tuple[object, int]]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for i, (ref, crc) in enumerate(buckets):
            blob = ray.get(ref)
            assert zlib.crc32(blob) == crc
            (Path(folder) / str(i)).write_bytes(memoryview(blob))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    weights = [(f"w{i}", torch.randn(1024, 1024).bfloat16().to(args.device)) for i in range(args.mib // 2)]
    start_local_ray(
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=3 * args.mib * 2**20,
    )
    shared_memory.model_shapes = lambda _: ({name: tuple(t.shape) for name, t in weights}, set())
    publisher, receiver = SharedMemoryPublisher(BUCKET_MIB), SharedMemoryReceiver("", 300)
    took: dict[str, list[float]] = {}

    def timed(name: str, call, *arguments):
        began = time.perf_counter()
        result = call(*arguments)
        took.setdefault(name, []).append(time.perf_counter() - began)
        return result

    for version in range(1, args.rounds + 2):
        update = timed("ours: publish", lambda v=version: publisher.publish(iter(weights), v))
        receiver.release(timed("ours: receive", receiver.receive, update))
        del update
        buckets = timed("library: publish", library_publish, weights)
        timed("library: receive", library_receive, buckets)
        del buckets
    middle = {
        name: statistics.median(seconds[1:]) for name, seconds in took.items()
    }  # the first round maps the memory
    for name, seconds in middle.items():
        print(f"{name:18} {seconds:.2f} s for {args.mib} MiB on {args.device}")
    ours, library = (middle[f"{way}: publish"] + middle[f"{way}: receive"] for way in ("ours", "library"))
    print(f"library / ours = {library / ours:.2f}")


if __name__ == "__main__":
    main()
