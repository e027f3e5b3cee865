"""Tests share their process with others, in any order: what one leaves behind there, and the next could trip
over, is put right here."""

from __future__ import annotations

import atexit
import importlib
import inspect
import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
from hypothesis import settings
from process_state import as_it_was

# Two processes test at the same time: with a thread a core each would wait for the other's, and take twice as
# long. It is read when PyTorch is imported, and is what rollout workers and learners get in a run.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A Ray that a test starts answers holders of this token alone. It reads both when it is imported; without
# them it would leave a token file in the home folder.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# PyTorch asks for a name at each connection that it makes. Where a name server drops the question, the answer
# would take 5 s and more.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Models that a test makes are kept in a folder of this run of the tests, which all its processes share: none
# comes from the user's cache, or is found by one test or not, by which of them came first.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["UNSPIRAL_CACHE"] = tempfile.mkdtemp(prefix="unspiral-cache-")
    atexit.register(shutil.rmtree, os.environ["UNSPIRAL_CACHE"], ignore_errors=True)

# Hints name commands as they can be typed (services.common.printing.commands): in the tests by their short
# name, whether or not the environment is activated. That of the oldest versions lacks the command.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
if shutil.which("unspiral") is None:
    command = Path(tempfile.mkdtemp(prefix="unspiral-command-")) / "unspiral"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m trainer "$@"\n')
    command.chmod(0o755)
    atexit.register(shutil.rmtree, command.parent)
    os.environ["PATH"] += f"{os.pathsep}{command.parent}"

# A test that names no limit of its own waits a minute for an answer: the five seconds of httpx are soon over
# on two busy cores. All its functions share this one object.
for part in ("connect", "read", "write", "pool"):
    setattr(inspect.signature(httpx.get).parameters["timeout"].default, part, 60.0)

# The same examples in each run: what they find is found by everybody, and at once.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")


def pytest_collection_modifyitems(items):
    """Files with whole systems in them first: two processes share the files out, and the last one to be taken
    should be a short one."""
    slow = {item.path for item in items if any(item.iter_markers("ray")) or any(item.iter_markers("vllm"))}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """World files and a barely warm-started policy, for runs that do not care what they learn."""
    from end_to_end import laboratory

    return laboratory(tmp_path_factory.mktemp("laboratory"))


@pytest.fixture(autouse=True)
def process_as_it_was(tmp_path_factory):
    with as_it_was(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture(autouse=True, scope="module")
def deepspeed_knows_no_dead_process_group():
    """vLLM, where a test steps it in this process, destroys the process groups when it ends. DeepSpeed would
    go on using them."""
    groups, torch = sys.modules.get("deepspeed.utils.groups"), sys.modules.get("torch")
    if groups is None or torch is None:
        return
    alive = torch.distributed.distributed_c10d._world.pg_map
    if not torch.distributed.is_initialized() or (
        groups._WORLD_GROUP is not None and groups._WORLD_GROUP not in alive
    ):
        importlib.reload(groups)
        sys.modules["deepspeed.comm.comm"].cdb = None


@pytest.fixture
def vllm_on_a_gpu(monkeypatch):
    """vLLM takes this machine for one with a GPU. What changes vLLM as it is imported is imported before: it
    asks vLLM where it runs, once, and other tests of this process need what it does on a CPU."""
    importlib.import_module("services.rollout.engines.vllm_worker_extension")
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)


@pytest.fixture(scope="module")
def without_llvmlite():
    """vLLM's start scans the namespaces of all modules, and fails at an object of llvmlite's that answers to
    any attribute. A worker's process never loads llvmlite; this one may have, for the retriever's tests."""
    hidden = {
        name: sys.modules.pop(name)
        for name, module in list(sys.modules.items())
        if any(type(v).__name__ == "_lib_wrapper" for v in list(getattr(module, "__dict__", {}).values()))
    }
    yield
    sys.modules.update(hidden)
