"""Each service against its own OpenAPI description: no input makes a 5xx, what is described is what comes,
and the other way round."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from tests.common.gate_services import serving
from tests.retriever.retriever_fixtures import small_index  # noqa: F401

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
OPERATIONS = {"retriever": 9, "likelihood": 30, "control": 8, "agent": 6}


@pytest.mark.slow
@pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="needs schemathesis")
@pytest.mark.parametrize(("name", "operations"), OPERATIONS.items())
def test_schemathesis_finds_nothing_with_all_its_checks(tmp_path, small_index, name, operations):
    with serving(name, tmp_path, small_index) as served:
        words = [SCHEMATHESIS, "run", f"{served.url}/openapi.json", "--checks", "all", "--max-examples", "10"]
        words += ["--phases", "examples,coverage,fuzzing", "--exclude-path-regex", "/stream$", "--seed", "7"]
        words += ["--suppress-health-check", "all", "--generation-database", "none", "--no-color"]
        hooks = {"SCHEMATHESIS_HOOKS": "tests.common.schemathesis_hooks", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=250, cwd=ROOT, env={**os.environ, **hooks}
        )
    assert done.returncode == 0 and f"Tested: {operations}" in done.stdout, done.stdout[-4000:]
