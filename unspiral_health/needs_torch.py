"""Imported first by what computes with torch, which the wheel leaves to the trainer: one line says so where
it is not installed."""

from __future__ import annotations

NEEDED = (
    "LLDS and llds_loss of unspiral_health, and the adapters of trainers, need torch; this wheel leaves it "
    "to your trainer: pip install torch"
)

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":  # torch is there, and lacks something
        raise
    raise ModuleNotFoundError(NEEDED, name="torch") from None
