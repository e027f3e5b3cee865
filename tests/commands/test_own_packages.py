"""A user's package called like one of Unspiral's: one line, in place of a traceback."""

import os
import subprocess
import sys

import pytest
from places import ROOT

from services.common.errors import EnvironmentLacks
from services.common.loading.own_packages import refuse_others_here

COMMAND = """
import sys
# Of an editable install: it finds our modules within their package.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
from {module} import main
main()
"""
INSTALLED, MODULE = "unspiral_command", "trainer.__main__"


def call(folder, *words, by=INSTALLED):
    """The command, with a folder before Unspiral's own on the path."""
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTHONSAFEPATH": "1"}
    argv = [sys.executable, "-c", COMMAND.format(module=by), *words]
    return subprocess.run(argv, env=environment, cwd=folder, capture_output=True, text=True, timeout=240)


def package(folder, file):
    """Make a file, and give the name under which Python imports it."""
    place = folder / file
    place.parent.mkdir(exist_ok=True)
    place.touch()
    return file.split("/")[0].removesuffix(".py")


@pytest.mark.parametrize(
    ("by", "file"),
    [
        (INSTALLED, "trainer/__init__.py"),
        (INSTALLED, "trainer.py"),
        (INSTALLED, "services/__init__.py"),
        (MODULE, "services/__init__.py"),
        (MODULE, "retriever_service/__init__.py"),  # of a command that is loaded later
    ],
)
def test_the_command_names_the_users_package(tmp_path, by, file):
    name = package(tmp_path, file)
    shown = tmp_path / (name if "/" in file else file)
    done = call(tmp_path, "index", "info", "x", by=by)
    assert (done.returncode, done.stdout, done.stderr) == (
        3,
        "",
        f"unspiral: Python finds {shown} in place of Unspiral's own package `{name}`: name yours otherwise, "
        f"or leave {tmp_path} out of PYTHONPATH\n",
    )


def test_the_command_runs_where_no_name_clashes(tmp_path):
    (tmp_path / "mine").mkdir()
    done = call(tmp_path, "--version")
    assert done.returncode == 0 and done.stdout.startswith("unspiral "), done.stderr


@pytest.mark.parametrize("file", ["trainer/__init__.py", "services.py", "retriever_service/__init__.py"])
def test_a_run_is_not_started_beside_a_package_that_its_workers_would_import(tmp_path, file):
    name = package(tmp_path, file)
    says = f"workers of a run look here first, .* own `{name}`; name yours otherwise, or start the run in"
    with pytest.raises(EnvironmentLacks, match=says):
        refuse_others_here(tmp_path)


def test_a_run_is_started_in_a_checkout_and_anywhere_else(tmp_path):
    (tmp_path / "trainers").mkdir()
    refuse_others_here(tmp_path)
    refuse_others_here(ROOT)
