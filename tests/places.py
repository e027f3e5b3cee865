"""Where this tree's files lie, for tests."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
"""The repository's root."""
DATA = TESTS / "data"
"""Recorded runs, golden numbers, a small corpus."""
PYTHONPATH = os.pathsep.join(
    map(str, [ROOT, TESTS, *sorted(p for p in TESTS.iterdir() if p.is_dir() and not p.name.startswith("__"))])
)
"""For processes that import this tree and helpers of the tests, as the tests themselves do."""
