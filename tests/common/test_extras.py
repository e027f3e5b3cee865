"""Which extra brings a package, and what a message says where it is missing."""

import ast
import json
import re
import sys
import tomllib

import pytest
from places import ROOT

from services.common.loading import extras
from services.common.loading.extras import (
    DISTRIBUTIONS,
    EXTRAS,
    INSTALL,
    ON_ITS_OWN,
    PLAIN,
    distribution_name,
    how_to_install,
    not_imported,
    not_installed,
)

ROOMS = ("trainer", "services", "retriever_service")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def names(requirements):
    """Names of requirements such as `ray[default]==2.60.0`."""
    return {re.match(r"[\w.-]+", line)[0].lower() for line in requirements}


def third_party_imports():
    """Top-level packages that our code imports, anywhere in it, and the files that do."""
    found = {}
    for file in (f for room in ROOMS for f in sorted((ROOT / room).rglob("*.py"))):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            else:
                continue
            for name in {m.split(".")[0] for m in modules} - set(ROOMS) - sys.stdlib_module_names:
                found.setdefault(name, []).append(str(file.relative_to(ROOT)))
    return found


def test_each_package_is_brought_by_the_extra_that_its_message_names():
    extras = PROJECT["optional-dependencies"]
    wrong = {m: e for m, e in EXTRAS.items() if distribution_name(m).lower() not in names(extras[e])}
    assert wrong == {}
    assert {m for m in PLAIN if distribution_name(m).lower() not in names(PROJECT["dependencies"])} == set()


def test_what_cpu_brings_gpu_brings_too():
    brought = {m for m, extra in EXTRAS.items() if extra == "cpu"} - {"vllm"}
    assert {distribution_name(m) for m in brought} <= names(PROJECT["optional-dependencies"]["gpu"])


def test_each_package_that_the_code_imports_is_in_the_table():
    unknown = {
        m: files for m, files in third_party_imports().items() if m not in (*EXTRAS, *PLAIN, *ON_ITS_OWN)
    }
    assert unknown == {}
    assert set(DISTRIBUTIONS) <= {*EXTRAS, *PLAIN}


def test_each_dependency_of_a_plain_install_has_a_floor():
    assert [line for line in PROJECT["dependencies"] if not re.search(r"==|>=", line)] == []
    for extra, lines in PROJECT["optional-dependencies"].items():
        assert [line for line in lines if not re.search(r"==|>=", line)] == [], extra


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("redis", "redis is not installed; in a checkout of Unspiral: pip install '.[redis]'"),
        (
            "qdrant_client.http",
            "qdrant_client is not installed; in a checkout of Unspiral: pip install '.[qdrant]'",
        ),
        ("torch", f"torch is not installed; in a checkout of Unspiral: {INSTALL['cpu']} (with NVIDIA GPUs: "),
        ("wandb", "wandb is not installed: pip install wandb"),
        (
            "numba",
            "numba is not installed, which a plain install brings; in a checkout of Unspiral: pip install .",
        ),
        ("lark", "lark is not installed, and no part of Unspiral needs it"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_brings_it(module, says):
    assert not_installed(module).startswith(says)


def test_a_package_that_is_there_and_broken_is_not_called_missing():
    broken = ImportError("libcuda.so.1: cannot open shared object file", name="faiss")
    assert not_imported(broken, "dense") == (
        "faiss is installed, and cannot be imported: libcuda.so.1: cannot open shared object file"
    )


def test_messages_and_pages_give_the_same_commands():
    """No page or message has an install command of its own, or names a distribution that is on no index."""
    text = {
        p: p.read_text(encoding="utf-8")
        for p in (*PAGES, *(f for r in ROOMS for f in (ROOT / r).rglob("*.py")))
    }
    assert [str(p) for p, t in text.items() if "unspiral[" in t] == []
    commands = {c for p in PAGES for c in re.findall(r"(?<!uv )pip install '\.\[cpu\]'[^`\n(#]*", text[p])}
    assert {c.strip() for c in commands if "--find-links" not in c} == {INSTALL["cpu"]}
    assert INSTALL["cpu"] in how_to_install("cpu")


@pytest.mark.parametrize(
    ("noted", "says"),
    [
        (
            {"url": "file://TMP/my%20wheels/unspiral-1-py3-none-any.whl", "archive_info": {}},
            "from the wheel that this was installed from: pip install "
            "'TMP/my wheels/unspiral-1-py3-none-any.whl[redis]'",
        ),
        (
            {"url": "file://TMP/src", "dir_info": {}},
            "from the checkout that this was installed from: pip install 'TMP/src[redis]'",
        ),
        (
            {"url": "file://TMP/gone", "dir_info": {}},
            "from Unspiral's wheel (WHEEL: its file): pip install 'WHEEL[redis]'",
        ),
        (None, "from Unspiral's wheel (WHEEL: its file): pip install 'WHEEL[redis]'"),
    ],
)
def test_an_install_from_elsewhere_names_what_it_was_installed_from(monkeypatch, tmp_path, noted, says):
    for made in ("my wheels/unspiral-1-py3-none-any.whl", "src/pyproject.toml"):
        (tmp_path / made).parent.mkdir()
        (tmp_path / made).touch()

    class Installed:
        def read_text(self, name):
            text = json.dumps(noted).replace("TMP", str(tmp_path))
            return text if noted and name == "direct_url.json" else None

    monkeypatch.setattr(extras, "_CHECKOUT", tmp_path / "pyproject.toml")
    monkeypatch.setattr(extras.metadata, "distribution", lambda name: Installed())
    assert not_installed("redis") == f"redis is not installed; {says.replace('TMP', str(tmp_path))}"
    assert "install '." not in not_installed("torch") and "install .;" not in not_installed("numba")
