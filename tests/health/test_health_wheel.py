"""The thin wheel: what is in it, what it needs, and that it leaves a project's own `services` alone."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest

from tests.health.health_wheel import ROOT, build, unpack
from tests.likelihood.likelihood_service import serving

pytest.importorskip("setuptools")
PYPROJECT = tomllib.loads((ROOT / "packages" / "health" / "pyproject.toml").read_text(encoding="utf-8"))
LATER = {"torch", "transformers", "ray", "verl", "openrlhf", "skyrl", "slime", "megatron", "transfer_queue"}
"""Of trainers, which bring them; nothing imports them before an adapter or the loss is asked for."""
LAZY = {"ruamel", "tensorboard"}
"""Imported where a file of metrics or of their names is read, which no part of the public interface does."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    return unpack(wheel, tmp_path_factory.mktemp("site"))


def run(code, folder, *paths, absent=()):
    """Python in a folder, with the unpacked wheel and without this tree."""
    script = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {set(absent)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    argv = [sys.executable, "-c", script + code]
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_the_wheel_is_small_and_brings_one_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert wheel.name == f"unspiral_health-{version}-py3-none-any.whl"
    assert tops == {"unspiral_health", f"unspiral_health-{version}.dist-info"}
    page = (ROOT / "docs" / "any_trainer.md").read_text(encoding="utf-8")
    (most,) = re.findall(r"pip install \./packages/health +# under (\d+) kB;", page)
    assert wheel.stat().st_size < 1000 * int(most)
    assert "unspiral_health/py.typed" in names
    served = [n for n in names if re.search(r"likelihood/(rest|store)|services/(rollout|control)/|static", n)]
    assert served == []


def test_every_module_imports_where_this_trees_packages_and_the_trainers_are_absent(site, tmp_path):
    """Not torch: the losses are in it."""
    code = """
import importlib, pkgutil
import unspiral_health
before = sorted(m for m in sys.modules if m.split(".")[0] in ("torch", "transformers", "ray", "fastapi"))
failed = {}
for found in pkgutil.walk_packages(unspiral_health.__path__, "unspiral_health."):
    if found.name.endswith((".launch", ".trl", ".hugging_face", ".skyrl", ".verl_plugin")):
        continue
    try:
        importlib.import_module(found.name)
    except Exception as e:
        failed[found.name] = repr(e)
print(before, failed)
"""
    absent = ("services", "trainer", "retriever_service", "fastapi", "ray", "vllm", "numba", "redis", "verl")
    done = run(code, tmp_path, site, absent=absent)
    assert done.stdout == "[] {}\n", done.stderr


def test_the_package_tells_its_version_and_all_its_names(site, tmp_path):
    code = """
import unspiral_health as u
hidden = {*u.__all__, "adapters", "__version__"} - {*dir(u)}
print(u.__version__, hidden, u.adapters.__name__, "torch" in sys.modules)
"""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    done = run(code, tmp_path, site, absent=("torch", "services", "trainer"))
    assert done.stdout == f"{version} set() unspiral_health.adapters False\n", done.stderr


def test_posting_needs_no_torch_and_the_loss_says_that_it_does(site, tmp_path):
    code = """
import importlib
import unspiral_health as u
print(len(u.detectors.DETECTORS) > 15, u.LagMemory, u.padded_records is not None)
for name in ("llds", "adapters.trl", "adapters.verl", "adapters.openrlhf", "adapters.slime"):
    try:
        importlib.import_module(f"unspiral_health.{name}")
    except ModuleNotFoundError as e:
        print(e.name, e)
from unspiral_health import LLDS
"""
    done = run(code, tmp_path, site, absent=("torch", "services", "trainer"))
    says = (
        "LLDS and llds_loss of unspiral_health, and the adapters of trainers, need torch; this wheel leaves "
        "it to your trainer: pip install torch"
    )
    assert done.stdout.splitlines()[1:] == [f"torch {says}"] * 5, done.stderr
    assert done.stderr.splitlines()[-1] == f"ModuleNotFoundError: {says}"
    assert "During handling" not in done.stderr
    assert done.stdout.startswith("True <class 'unspiral_health._unspiral.services.likelihood")


def test_what_it_imports_is_what_it_depends_on(site):
    needed = {re.match(r"[\w-]+", d)[0].replace("-", "_") for d in PYPROJECT["project"]["dependencies"]}
    found = set()
    for file in (site / "unspiral_health").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module.split(".")[0])
    foreign = found - set(sys.stdlib_module_names) - {"unspiral_health"} - LATER - LAZY
    assert foreign - {"pydantic_core"} == needed  # which pydantic brings


def test_what_cannot_be_renamed_is_refused(tmp_path):
    sys.path.insert(0, str(ROOT / "packages" / "health"))
    try:
        import collect
    finally:
        sys.path.pop(0)
    package = tmp_path / "unspiral_health"
    package.mkdir()
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "names.py").write_text("")
    for text, why in {
        "import services.names": "unspiral_health/a.py:1: write `from PACKAGE import MODULE`",
        "from . import b": "unspiral_health/a.py:1: a relative import; write the whole name",
        "x = 'services.names'": "unspiral_health/a.py:1: 'services.names' is a module by its name",
    }.items():
        (package / "a.py").write_text(text)
        with pytest.raises(collect.CannotCollect) as refused:
            collect.closure(tmp_path)
        assert str(refused.value) == why
    (package / "a.py").write_text("from services import names\n")
    assert set(collect.closure(tmp_path)) == {"unspiral_health.a", "services.names"}
    assert collect.renamed("from services import names\n") == (
        "from unspiral_health._unspiral.services import names\n"
    )


STRANGER = """
import math
import sys
from unspiral_health import Run

with Run(sys.argv[1], "mine") as run:
    for step in range(40):
        lost = 0.0 if step < 20 else 0.02 * (step - 20)     # right answers slip away from step 20 on
        metrics = {"reward/mean": 0.5 + 0.01 * math.sin(step), "grad_norm": 1.0, "probe/lag": -lost}
        answer = {"tokens": 10, "logp_before": -4.0, "logp_after": -4.0 - lost}
        rows = [
            {"uid": f"{i}", "group": "q", "reward": i % 2, "advantage": i % 2 - 0.5, "actions": [answer]}
            for i in range(4)
        ]
        run.post(step, metrics, rows)
    for alarm in run.alarms():
        print(alarm["rule"], alarm["step"], alarm["seen"])
    print(run.phase())
"""


def test_a_strangers_script_posts_a_run_and_sees_its_alarm(site, tmp_path):
    """Twenty lines, one file, nothing of this tree but the wheel; the project's own `services` is used.

    UNSPIRAL_HEALTH_PYTHON is a Python that the wheel is installed in (deploy/test_adapters.sh)."""
    installed = os.environ.get("UNSPIRAL_HEALTH_PYTHON")
    assert len(STRANGER.strip().splitlines()) <= 20
    project = tmp_path / "project"
    (project / "services").mkdir(parents=True)
    (project / "services" / "__init__.py").write_text("MINE = True\n")
    (project / "train.py").write_text(STRANGER + "import services; print(services.MINE)\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    with serving(tmp_path) as server:
        done = subprocess.run(
            [installed or sys.executable, "train.py", server.url],
            cwd=project,
            env=environment if installed else environment | {"PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("likelihood 2") and "have lost 0." in lines[0]
    assert lines[-2:] == ["acceleration", "True"]


def test_both_wheels_beside_a_project_with_its_own_services(site, tmp_path):
    """The main wheel's folders are shadowed by the project's; the thin one's modules are its own."""
    project = tmp_path / "project"
    (project / "services").mkdir(parents=True)
    (project / "services" / "__init__.py").write_text("MINE = True\n")
    code = """
import services
from unspiral_health import LikelihoodClient
print(services.MINE, LikelihoodClient.__module__)
"""
    both = tmp_path / "both"
    both.mkdir()
    for folder in ("services", "trainer", "retriever_service"):
        (both / folder).symlink_to(ROOT / folder)
    done = run(code, project, project, site, both)
    assert done.stdout == "True unspiral_health._unspiral.services.likelihood.client\n", done.stderr
    code = """
import services.likelihood.client as whole
from unspiral_health import LikelihoodClient
print(whole.LikelihoodClient is LikelihoodClient, "_unspiral" in whole.__file__)
"""
    done = run(code, tmp_path, both, site)
    assert done.stdout == "False False\n", done.stderr
