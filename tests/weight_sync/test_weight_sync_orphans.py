"""Weights that a killed worker left in shared memory are removed by the next receiver; those of the living
stay."""

import os
import subprocess
import sys
import time
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from services.weight_sync import shared_memory
from services.weight_sync.base import WeightSyncError


def test_folders_of_dead_processes_alone_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "_MEMORY", tmp_path)
    monkeypatch.setattr(shared_memory.tempfile, "gettempdir", lambda: str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    prefix = shared_memory._prefix()
    names = {
        "dead": f"{prefix}{ended.pid}-x",
        "alive": f"{prefix}{os.getpid()}-x",
        "of another container": f"unspiral-weights-1-{ended.pid}-x",
        "of others": "weights",
    }
    for name in names.values():
        (tmp_path / name).mkdir()
        (tmp_path / name / "bucket_0000.safetensors").write_bytes(b"x")
    shared_memory.SharedMemoryReceiver("model", 1.0)
    assert {k for k, name in names.items() if (tmp_path / name).exists()} == {
        "alive",
        "of another container",
        "of others",
    }


def test_weights_that_do_not_arrive_are_one_line_of_exit_status_1():
    assert WeightSyncError.exit_code == 1


def test_a_bucket_that_is_no_safetensors_file_leaves_the_worker_its_old_version(tmp_path):
    pytest.importorskip("ray")
    blob = np.frombuffer(b"no header at all", np.uint8)
    arrived = Future()
    arrived.set_result(blob)
    ref = SimpleNamespace(future=lambda: arrived)
    bucket = shared_memory.Bucket(ref, len(blob), shared_memory.checksum(blob), ())
    with pytest.raises(WeightSyncError, match="version 7: bucket_0000 is not a safetensors file"):
        shared_memory._write(bucket, tmp_path / "bucket_0000.safetensors", 7, time.monotonic() + 5)
