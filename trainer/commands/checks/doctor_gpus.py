"""The doctor's look at NVIDIA cards: what torch can use, and cards and drivers below what its wheel needs."""

from __future__ import annotations

import csv
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from services.common.counting import counted
from services.common.loading.extras import how_to_install
from trainer.commands.checks.findings import Finding
from trainer.commands.version import version

MIN_DRIVER = {12: 525, 13: 580}
"""First branch of drivers by the major version of CUDA: NVIDIA, CUDA Compatibility, "Minor Version
Compatibility"."""
MIN_CAPABILITY = (7, 5)
"""Turing. vLLM's installation guide; PyTorch's builds for CUDA 13 hold kernels from there on, too."""
BFLOAT16 = (8, 0)
"""Ampere: vLLM refuses bfloat16 below it, in which most checkpoints are kept."""
QUERY = "name,driver_version,compute_cap"
SECONDS = 20
"""For nvidia-smi, which waits for a driver that hangs."""


@dataclass(frozen=True)
class Card:
    """As nvidia-smi has it."""

    name: str
    driver: str
    capability: tuple[int, int] | None
    """None where a driver is too old to tell it."""


def cards() -> list[Card]:
    """The NVIDIA cards of this machine, whatever torch makes of them; none without a driver."""
    try:
        rows = _told(QUERY) or [[*row, ""] for row in _told(QUERY.rpartition(",")[0])]
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [Card(name, driver, _capability(number)) for name, driver, number in rows]


def _told(query: str) -> list[list[str]]:
    """A row of each card; none where nvidia-smi refuses a field, as that of an old driver does."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    rows = [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines())]
    return [row for row in rows if len(row) == query.count(",") + 1] if done.returncode == 0 else []


def _capability(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def old_driver(card: Card, cuda: str) -> Finding | None:
    """The finding about a driver that has no way to run the CUDA that torch was built for."""
    needed = MIN_DRIVER.get(int(cuda.partition(".")[0]))
    branch = card.driver.partition(".")[0]
    if not needed or not branch.isdecimal() or int(branch) >= needed:
        return None
    advice = f"torch is built for CUDA {cuda}, which needs a driver from {needed} on (docs/gpu.md)"
    return Finding("GPU driver", "bad", f"{card.driver}, of {card.name}", advice)


def old_card(card: Card) -> Finding | None:
    """The finding about a card that the wheels have no code for, or that has no bfloat16."""
    if card.capability is None or card.capability >= BFLOAT16:
        return None
    seen = f"{card.name}, compute capability {'.'.join(map(str, card.capability))}"
    if card.capability < MIN_CAPABILITY:
        return Finding("GPU", "bad", seen, "torch and vLLM need 7.5 (T4, RTX 20) or newer (docs/gpu.md)")
    advice = "it has no bfloat16: set rollout.dtype and learner.dtype to float32 (docs/gpu.md)"
    return Finding("GPU", "note", seen, advice)


def check_gpus() -> Iterator[Finding]:
    """The GPUs of torch, or why it has none."""
    if version("torch") is None:
        return
    import torch

    there = cards()
    cuda = torch.version.cuda
    if there and cuda is None:
        seen = f"{counted(len(there), 'card')}, such as {there[0].name}, and torch {version('torch')}"
        advice = f"that build of torch is for CPUs; with GPUs {how_to_install('gpu')}"
        yield Finding("GPU", "note", seen, advice)
        return
    usable = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    names = [torch.cuda.get_device_name(i) for i in usable]
    # Of those that torch sees, since a small card for the screen may be hidden from it; if none, of all.
    used = [Card(names[i], "", torch.cuda.get_device_capability(i)) for i in usable]
    # One that torch can use is new enough, or has CUDA's package of forward compatibility beside it.
    old = [old_driver(card, cuda) for card in there if cuda and not names]
    old += [old_card(card) for card in used or there]
    findings = [found for found in dict.fromkeys(old) if found]
    yield from findings
    if not names:
        if not findings:
            yield Finding("GPU", "note", "none", "runs are on CPU: small models only")
        return
    yield Finding("GPU", "good", f"{len(names)} x {names[0]}" if len(set(names)) == 1 else ", ".join(names))
    number = ".".join(map(str, torch.cuda.nccl.version()))
    variables = {k: v for k, v in os.environ.items() if k.startswith("NCCL_")}
    advice = "these variables must be the same for learner and workers" if variables else ""
    yield Finding("NCCL", "good", f"{number} {variables or ''}", advice)
