"""`doctor` on cards and drivers below what the wheels of torch and vLLM need; nvidia-smi and torch tell of
machines that are not here."""

from __future__ import annotations

import pytest

from trainer.commands.checks import doctor_gpus
from trainer.commands.checks.findings import Finding

torch = pytest.importorskip("torch")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes a machine: lines of nvidia-smi, torch's CUDA, and the cards that torch sees."""

    def make(told, cuda="13.0", seen=(), without=""):
        smi = tmp_path / "nvidia-smi"
        refused = f"case $1 in *{without}*) echo no such field; exit 2;; esac\n" if without else ""
        smi.write_text(f"#!/bin/sh\n{refused}cat <<'END'\n{told}\nEND\n")
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(seen))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: seen[i][0])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: seen[i][1])
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
        return list(doctor_gpus.check_gpus())

    return make


def test_a_driver_below_that_of_cuda_is_bad_in_one_line(machine):
    told = "NVIDIA A100-SXM4-80GB, 535.161.08, 8.0\nNVIDIA A100-SXM4-80GB, 535.161.08, 8.0"
    advice = "torch is built for CUDA 13.0, which needs a driver from 580 on (docs/gpu.md)"
    expected = Finding("GPU driver", "bad", "535.161.08, of NVIDIA A100-SXM4-80GB", advice)
    assert machine(told) == [expected]
    a100 = ("NVIDIA A100-SXM4-80GB", (8, 0))
    assert [found.level for found in machine(told, "12.9", [a100, a100])] == ["good", "good"]


def test_a_driver_that_torch_can_use_all_the_same_is_not_too_old(machine):
    """CUDA's package of forward compatibility brings the newer part of it along."""
    found = machine("NVIDIA A100-SXM4-80GB, 535.161.08, 8.0", seen=[("NVIDIA A100-SXM4-80GB", (8, 0))])
    assert [(one.what, one.level) for one in found] == [("GPU", "good"), ("NCCL", "good")]


def test_a_driver_too_old_to_know_the_capability_of_a_card_is_told(machine):
    (found,) = machine("Tesla V100-SXM2-32GB, 470.223.02", without="compute_cap")
    assert (found.what, found.level, found.seen) == (
        "GPU driver",
        "bad",
        "470.223.02, of Tesla V100-SXM2-32GB",
    )


@pytest.mark.parametrize(
    ("name", "capability", "level", "advice"),
    [
        ("Tesla V100-SXM2-32GB", (7, 0), "bad", "torch and vLLM need 7.5"),
        ("Tesla T4", (7, 5), "note", "it has no bfloat16: set rollout.dtype and learner.dtype to float32"),
    ],
)
def test_a_card_that_is_too_old_is_told_with_its_generation(machine, name, capability, level, advice):
    number = ".".join(map(str, capability))
    first, *_ = machine(f"{name}, 580.95.05, {number}", seen=[(name, capability)])
    assert (first.what, first.level, first.seen) == ("GPU", level, f"{name}, compute capability {number}")
    assert first.advice.startswith(advice)
    (alone,) = machine(f"{name}, 580.95.05, {number}")  # a card that torch does not take
    assert alone == first


def test_a_card_that_is_hidden_from_torch_counts_for_nothing(machine):
    told = "NVIDIA H200, 580.159.03, 9.0\nQuadro K620, 580.159.03, 5.0"
    found = machine(told, seen=[("NVIDIA H200", (9, 0))])
    assert [(one.what, one.level) for one in found] == [("GPU", "good"), ("NCCL", "good")]
    assert found[0].seen == "1 x NVIDIA H200"


def test_a_build_of_torch_for_cpus_beside_a_card_is_told(machine):
    (found,) = machine("NVIDIA H200, 580.159.03, 9.0", cuda=None)
    assert found.level == "note" and found.seen.startswith("1 card, such as NVIDIA H200, and torch 2.")
    assert "for CPUs" in found.advice and "[gpu]" in found.advice


@pytest.mark.parametrize("told", ["", "No devices were found", "Failed to initialize NVML: a, b"])
def test_without_a_card_or_with_one_that_tells_nothing_runs_are_on_cpu(machine, told):
    assert machine(told) == [Finding("GPU", "note", "none", "runs are on CPU: small models only")]


def test_a_capability_that_an_old_driver_cannot_tell_is_not_judged(machine):
    found = machine("NVIDIA H200, 580.159.03, [N/A]")
    assert [one.seen for one in found] == ["none"]
