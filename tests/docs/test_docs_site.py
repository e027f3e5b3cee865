"""The docs build into a site without a warning, and links of the pages outside it lead somewhere."""

import re
import subprocess
import sys

import badges
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


def test_the_badges_say_what_the_tree_says():
    assert badges.FILE.read_text(encoding="utf-8") == badges.drawn(badges.badges()), (
        "run tests/docs/badges.py"
    )
    assert "http" not in badges.FILE.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")


def test_the_pictures_of_the_readme_are_of_the_tree_and_small():
    shown = re.findall(r"!\[.+\]\((.+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(shown) >= 3 and all(name.startswith("docs/images/") for name in shown)
    assert sum((ROOT / name).stat().st_size for name in shown) < 400_000


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_of_the_front_pages_lead_to_files(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    missing = [target for target in LINK.findall(text) if not (ROOT / target).exists()]
    assert missing == []
