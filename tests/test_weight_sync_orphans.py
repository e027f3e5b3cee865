"""Weights that a killed worker left in shared memory are removed by the next receiver; those of the living
stay."""

import os
import subprocess
import sys

from services.weight_sync import shared_memory
from services.weight_sync.base import WeightMismatchError, WeightSyncError


def test_folders_of_dead_processes_alone_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "_MEMORY", tmp_path)
    monkeypatch.setattr(shared_memory.tempfile, "gettempdir", lambda: str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(20)
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
    assert WeightSyncError.exit_code == WeightMismatchError.exit_code == 1
