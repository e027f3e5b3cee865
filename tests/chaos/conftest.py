"""How much chaos: CHAOS_STEPS (200), CHAOS_KILLS (20), CHAOS_SEED (0), CHAOS_ENGINE (vllm). CHAOS_FOLDER
keeps the undisturbed runs for the next time."""

import os
import signal
from pathlib import Path

import pytest


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
    return (
        Path(os.environ["CHAOS_FOLDER"]) if "CHAOS_FOLDER" in os.environ else tmp_path_factory.mktemp("chaos")
    )


@pytest.fixture(scope="session", autouse=True)
def ends_cleanly_when_it_is_stopped():
    """`ray start` processes must not outlive a suite that is ended by SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)
