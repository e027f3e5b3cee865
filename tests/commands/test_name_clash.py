"""A project's package with a name of Unspiral's, found before it: one line in place of a traceback."""

import os
import subprocess
import sys

import pytest
from places import ROOT

START = """
import sys
# Of an editable install: it finds our modules within their package.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
sys.argv = ["unspiral", "index", "info", "x"]
from trainer.__main__ import main
main()
"""


@pytest.mark.parametrize("package", ["services", "retriever_service"])
def test_a_package_that_stands_before_ours_is_named_with_its_folder(tmp_path, package):
    theirs = tmp_path / package
    theirs.mkdir()
    (theirs / "__init__.py").touch()
    ran = subprocess.run(
        [sys.executable, "-c", START],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (
        3,
        "",
        f"unspiral: Python finds {theirs} in place of Unspiral's own package `{package}`: name yours "
        f"otherwise, or leave {tmp_path} out of PYTHONPATH\n",
    )
