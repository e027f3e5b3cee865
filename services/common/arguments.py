"""What several commands read from their words."""

from __future__ import annotations

from pathlib import Path

from services.common.errors import UserError


def one_out(command: str, given: Path | None, option: Path | None) -> Path:
    """Where a command writes to, which is told by its last argument or by --out. Raises UserError."""
    if given is not None and option is not None:
        raise UserError(f"{command}: {given} and --out {option} both say where to write; give one of them")
    if (out := given or option) is None:
        raise UserError(f"{command}: it is not said where to write; give --out PATH, or PATH at the end")
    return out
