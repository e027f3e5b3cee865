"""The GPUs of this machine, as torch sees them."""

from __future__ import annotations


def gpu_count() -> int:
    """GPUs that torch sees; 0 without a driver. Raises ImportError without torch."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
