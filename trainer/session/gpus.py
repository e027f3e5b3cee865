"""Whether this machine has the GPUs that a configuration needs, told before Ray starts."""

from __future__ import annotations

import os

from services.common.errors import EnvironmentLacks
from services.common.loading.extras import installed
from trainer.config.gpus_needed import lack_of_gpus
from trainer.config.schema import Config


def gpus_here() -> int:
    """GPUs of this machine that PyTorch can use; 0 where it is not installed."""
    if installed("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def check_gpus_here(config: Config) -> None:
    """Raises EnvironmentLacks where a Ray that starts here would have too few. A cluster that is joined
    answers for itself."""
    if not os.environ.get("RAY_ADDRESS") and (lack := lack_of_gpus(config, gpus_here())):
        raise EnvironmentLacks("; ".join(lack))
