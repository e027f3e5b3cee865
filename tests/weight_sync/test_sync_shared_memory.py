"""Weights through Ray's object store: what lies in a bucket, and what its checksum notices."""

from __future__ import annotations

import errno
import math

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load

from services.weight_sync import WeightSyncError, shared_memory
from services.weight_sync.shared_memory import SharedMemoryPublisher, SharedMemoryReceiver, checksum

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def arrived(update) -> list[dict[str, torch.Tensor]]:
    """Each bucket's weights, read by the safetensors library."""
    blobs = [ray.get(bucket.ref, timeout=60) for bucket in update.payload]
    assert [(len(b), checksum(b)) for b in blobs] == [
        (bucket.nbytes, bucket.checksum) for bucket in update.payload
    ]
    return [load(b.tobytes()) for b in blobs]


def test_every_type_and_shape_arrives_bit_by_bit():
    random = torch.Generator().manual_seed(0)
    noise = lambda *shape: torch.randn(shape, generator=random)  # noqa: E731
    sent = {
        "odd.bfloat16": noise(3, 5).bfloat16(),  # 30 bytes: what follows is not aligned
        "float32": noise(7),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "transposed": noise(6, 9).T,
        "flags": torch.tensor([True, False, True]),
        "count": torch.tensor([2**40 + 1]),
        'a name with "quotes" and \u00e9': noise(1).half(),
    }
    update = SharedMemoryPublisher(1).publish(iter(sent.items()), 3)
    [got] = arrived(update)
    assert got.keys() == sent.keys() and update.nbytes == update.payload[0].nbytes
    for name, tensor in sent.items():
        assert (
            got[name].dtype == tensor.dtype
            and got[name].shape == tensor.shape
            and torch.equal(got[name], tensor)
        ), name


def test_buckets_hold_what_fits_and_a_larger_tensor_goes_alone():
    sizes = {
        "a": 100_000,
        "b": 150_000,
        "huge": 700_000,
        "c": 262_144,
        "d": 1,
    }  # float32; a bucket of 1 MiB holds 262,144
    sent = {name: torch.arange(n, dtype=torch.float32) + i for i, (name, n) in enumerate(sizes.items())}
    buckets = arrived(SharedMemoryPublisher(1).publish(iter(sent.items()), 1))
    assert [sorted(b) for b in buckets] == [["a", "b"], ["huge"], ["c"], ["d"]]
    assert all(torch.equal(tensor, sent[name]) for b in buckets for name, tensor in b.items())


def test_a_source_may_overwrite_what_it_gave():
    def weights():
        shared = torch.zeros(200_000)
        for i in range(9):
            shared.fill_(i)
            yield f"w{i}", shared
        shared.fill_(math.nan)

    got = {name: t for b in arrived(SharedMemoryPublisher(1).publish(weights(), 1)) for name, t in b.items()}
    assert all(torch.equal(got[f"w{i}"], torch.full((200_000,), float(i))) for i in range(9))


def test_more_names_than_a_header_has_room_for_make_a_bucket_more():
    sent = {f"{'long.' * 40}{i}": torch.tensor([float(i)]) for i in range(5000)}
    buckets = arrived(SharedMemoryPublisher(64).publish(iter(sent.items()), 1))
    assert len(buckets) == 2 and {n: t.item() for b in buckets for n, t in b.items()} == {
        n: t.item() for n, t in sent.items()
    }


def test_a_name_twice_no_weights_and_a_type_that_has_no_place_are_one_line_each():
    publisher, one = SharedMemoryPublisher(1), torch.ones(2)
    for given, message in (
        ([("a", one), ("a", one)], "weights of version 4: a was given twice"),
        ([], "weights of version 4: there are none"),
        (
            [("a", one), ("b", one.to(torch.complex64))],
            "b is of type complex64: weights may be float64, float32",
        ),
    ):
        with pytest.raises(WeightSyncError, match=message):
            publisher.publish(iter(given), 4)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 5 * 4096 + 17])
def test_the_checksum_notices_every_changed_byte_and_blocks_that_changed_places(size):
    random = np.random.default_rng(0)
    blob = random.integers(0, 256, size, np.uint8)
    was = checksum(blob)
    for at in random.integers(0, size, 200) if size else ():
        other = blob.copy()
        other[at] ^= 1 << int(random.integers(8))
        assert checksum(other) != was
    if size > 2 * 4096:
        assert checksum(np.concatenate([blob[4096:8192], blob[:4096], blob[8192:]])) != was
        assert checksum(blob[4096:]) != was


def test_memory_that_another_worker_fills_meanwhile_sends_the_weights_through_a_folder(tmp_path, monkeypatch):
    sent = {f"w{i}": torch.full((200_000,), float(i)) for i in range(4)}
    memory, elsewhere, write = tmp_path / "memory", tmp_path / "elsewhere", shared_memory._write
    memory.mkdir()
    elsewhere.mkdir()
    monkeypatch.setattr(shared_memory, "_MEMORY", memory)
    monkeypatch.setattr(shared_memory.tempfile, "gettempdir", lambda: str(elsewhere))
    monkeypatch.setattr(
        shared_memory, "model_shapes", lambda _: ({n: tuple(t.shape) for n, t in sent.items()}, set())
    )

    def full(bucket, path, *rest):
        if memory in path.parents and path.stem == "bucket_0002":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(bucket, path, *rest)

    monkeypatch.setattr(shared_memory, "_write", full)
    receiver = SharedMemoryReceiver("m", 20)
    folder = receiver.receive(SharedMemoryPublisher(1).publish(iter(sent.items()), 1))
    assert folder.parent == elsewhere and not list(memory.iterdir())
    got = {name: t for file in folder.iterdir() for name, t in load(file.read_bytes()).items()}
    assert all(torch.equal(got[name], tensor) for name, tensor in sent.items())
    receiver.release(folder)
