"""The docs build into a site without a warning, and links of the pages outside it lead somewhere."""

import re
import subprocess
import sys

import pytest
from places import ROOT
from ruamel.yaml import YAML

PAGES = sorted(p.name for p in (ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")


def test_the_site_builds_without_a_warning(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--quiet",
            "--site-dir",
            str(tmp_path / "site"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    loaded = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="https?://')
    for page in (tmp_path / "site").rglob("*.html"):
        assert not loaded.search(page.read_text(encoding="utf-8")), f"{page} loads from another host"


def test_every_page_is_reached_from_the_navigation():
    nav = YAML(typ="safe").load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(next(iter(entry.values())) for entry in nav) == PAGES


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_of_the_front_pages_lead_to_files(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    missing = [target for target in LINK.findall(text) if not (ROOT / target).exists()]
    assert missing == []
