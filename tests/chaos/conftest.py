"""How much chaos: CHAOS_STEPS (200), CHAOS_KILLS (20), CHAOS_SEED (0), CHAOS_ENGINE (vllm)."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@pytest.fixture(scope="session")
def amount():
    number = lambda name, default: int(os.environ.get(f"CHAOS_{name}", default))  # noqa: E731
    return {
        "steps": number("STEPS", 200),
        "kills": number("KILLS", 20),
        "seed": number("SEED", 0),
        "engine": os.environ.get("CHAOS_ENGINE", "vllm"),
    }


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("chaos")
