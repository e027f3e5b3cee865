"""The scripts of a page share one object: a name that two of them set would break the one loaded first."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from places import ROOT

STATIC = ROOT / "services" / "likelihood" / "static"
SHELL = ROOT / "services" / "common" / "http" / "static"
SCRIPT = re.compile(r'<script src="/static/([^"]+)"')
SET = re.compile(r"^\s*U\.(\w+) = ", re.MULTILINE)


@pytest.mark.parametrize("page", ["live.html", "step.html", "prompt.html"])
def test_each_name_is_set_by_one_script_of_a_page(page):
    scripts = [name for name in SCRIPT.findall((STATIC / page).read_text()) if "vendor" not in name]
    assert len(scripts) >= 8
    files = [next(at / script for at in (STATIC, SHELL) if (at / script).is_file()) for script in scripts]
    names = Counter(name for file in files for name in set(SET.findall(file.read_text())))
    assert [name for name, count in names.items() if count > 1] == []
