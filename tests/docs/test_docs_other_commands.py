"""The commands of README and docs that are none of `unspiral`: modules, scripts and targets of this tree.

Each module or file must exist, each option must stand in its source, and each target in the Makefile.
"""

import re
from pathlib import Path

import pytest
from places import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
PASSES_ON = {"unspiral_health.adapters.launch"}
"""What stands after these is for another trainer."""
OURS = {p.name for p in ROOT.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
COMMAND = re.compile(r"python (?:-m (?P<module>[\w.]+)|(?P<file>[\w/]+\.py))(?P<rest>[^`\n|;&#]*)")


def shown(text):
    """(module or file, its options) of each command of a page that starts Python on a part of this tree."""
    found = []
    for match in COMMAND.finditer(re.sub(r"\\\n\s*", " ", text)):
        name = match["module"] or match["file"]
        if re.split(r"[./]", name)[0] in OURS and name != "trainer":  # test_docs_commands.py has that one
            options = [] if name in PASSES_ON else re.findall(r"(?<= )--[a-z][\w-]*", match["rest"])
            found.append((name, options))
    return found


def sources(name):
    """The files of a module or package, or the file itself; none where it does not exist."""
    if name.endswith(".py"):
        return [path for path in [ROOT / name] if path.exists()]
    place = ROOT.joinpath(*name.split("."))
    own = [path for path in [place.with_suffix(".py")] if path.exists()]
    own = own or sorted(place.glob("**/*.py") if (place / "__main__.py").exists() else [])
    grids = ROOT / "benchmarks/grids/command_line.py"  # options that all grids have
    if any("benchmarks.grids.command_line" in path.read_text(encoding="utf-8") for path in own):
        return [*own, grids]
    return own


def named(option, files: list[Path]):
    """Whether an option stands in a source as argparse or typer is told of it: as text or as a parameter."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    parameter = option.removeprefix("--").removeprefix("no-").replace("-", "_")
    return f'"{option}"' in text or re.search(rf"\b{parameter}: ", text) is not None


def faults(text):
    found = []
    for name, options in shown(text):
        files = sources(name)
        if not files:
            found.append(f"no module {name}")
        found += [f"{name} has no {option}" for option in options if files and not named(option, files)]
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    lines = re.findall(
        r"^(?: {4})?(?:\w+=\S+ )*make ([a-z][\w-]*) *(?:#|&&|$)|`make ([a-z][\w-]*)`", text, re.M
    )
    found += [f"no target {t}" for pair in lines for t in pair if t and t not in targets]
    return found


def test_what_does_not_exist_is_noticed():
    text = (
        "`python -m benchmarks.no_such --x`, `python -m benchmarks.collapse tables --pgae X`\n\nmake demmo\n"
    )
    assert faults(text) == [
        "no module benchmarks.no_such",
        "benchmarks.collapse has no --pgae",
        "no target demmo",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_modules_scripts_and_targets_that_a_page_names_exist(page):
    assert faults(page.read_text(encoding="utf-8")) == []


def test_they_are_found_at_all():
    assert sum(len(shown(page.read_text(encoding="utf-8"))) for page in PAGES) > 60
