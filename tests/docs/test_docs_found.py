"""What a newcomer looks for is found: files of a run, the control plane, options before results, tables on a
phone; and what was run is told from what was estimated."""

from __future__ import annotations

import ast
import re

import pytest
from chromium import CHROMIUM, browser  # noqa: F401
from page_parts import section
from places import ROOT
from test_docs_site import served, site  # noqa: F401

from trainer.commands.look.cli import Run

DOCS = ROOT / "docs"
in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
WRITERS = ("trainer/loop", "trainer/session", "trainer/commands/work")
"""What writes into a run's folder."""
FOLDERS = {"path", "run_dir", "folder", "run"}
"""Names of a run's folder in their code."""
ELSEWHERE = {"model"}
"""A checkpoint's model, exported into a temporary folder for one evaluation."""


def page(name):
    return (DOCS / name).read_text(encoding="utf-8")


def named(tree):
    """The module's constants that are texts: name -> text."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def files_written():
    """Names that are joined to a run's folder anywhere in the code that writes there."""
    found = set()
    shared = named(ast.parse((ROOT / "services/common/runs/paths.py").read_text(encoding="utf-8")))
    for file in (file for room in WRITERS for file in (ROOT / room).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        constants = shared | named(tree)
        for node in ast.walk(tree):
            if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)):
                continue
            left = node.left.args[0] if isinstance(node.left, ast.Call) and node.left.args else node.left
            name = left.attr if isinstance(left, ast.Attribute) else getattr(left, "id", None)
            if name not in FOLDERS:
                continue
            if isinstance(node.right, ast.Constant):
                found.add(node.right.value)
            if isinstance(node.right, ast.Name) and node.right.id in constants:
                found.add(constants[node.right.id])
    return found


def test_the_page_of_a_runs_folder_names_every_file_that_is_written_there():
    text = page("run_folder.md")
    found = files_written()
    seen = {"summary.json", "likelihood.db", "stall.txt", "fixed_probe.npz", "report.html", "spool"}
    assert seen <= found, "the scan sees them"
    table = "\n".join(line for line in text.splitlines() if line.startswith("| `"))
    assert sorted(name for name in found - ELSEWHERE if f"`{name}" not in table) == []
    assert "`eval/answers.jsonl`" in table and "`eval/search7-METHOD/`" in table


def test_a_run_is_explained_in_one_place_and_as_the_help_does():
    (help_of_run,) = (one.help for one in Run.__metadata__)
    said = help_of_run.removesuffix(".").lower()
    stated = re.escape(said.replace("runs/", "`runs/`").replace("latest", "`latest`"))
    (row,) = [line for line in page("run_folder.md").splitlines() if line.startswith("| RUN |")]
    assert re.search(stated, row.lower())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(f"a run is {stated}", readme.lower()) and "run_folder.md#what-run-and" in readme


def test_options_of_an_evaluation_stand_without_its_results_which_have_a_page():
    text = page("evaluation.md")
    parts = re.findall(r"^## (.+)$", text, re.M)
    assert parts[0] == "Evaluate a model on your own questions" and "evaluation_measured.md" in text
    assert parts.index("The papers' seven sets") < parts.index("Methods")
    assert "| option | effect |" in section(text, "The papers' seven sets")
    first = section(text, parts[0])
    assert "--suite" not in first and first.index("unspiral eval --config mine.yaml") < first.index(
        "EM 1.000"
    )
    assert "| | NQ |" not in text and "| | NQ |" in page("evaluation_measured.md")


def test_the_list_at_the_beginning_of_data_names_every_section():
    text = page("data.md")
    (named,) = re.findall(r"^Below: (.+?)\.\n\n", text, re.M | re.S)
    parts = [
        re.sub(r"[^a-z -]", "", part.lower()).replace(" ", "-")
        for part in re.findall(r"^## (.+)$", text, re.M)
    ]
    assert re.findall(r"\(#([\w-]+)\)", named) == parts[parts.index("formats") :]


def test_every_row_of_gpu_settings_says_whether_it_was_run():
    table = re.compile(r"^\| [^\n]* \| run or estimated \|\n\|[-| ]+\|\n((?:\|.*\n)+)", re.M)
    text = page("gpu.md")
    for row in "".join(table.findall(text)).splitlines():
        assert row.split("|")[-2].split()[0].rstrip(":,;") in ("run", "estimated"), row
    assert len(table.findall(section(text, "Placement") + "\n")) >= 1
    (by_size,) = table.findall(section(text, "Memory by model size") + "\n")
    for size in ("1.5B", "3B", "7B"):
        (row,) = [row for row in by_size.splitlines() if row.startswith(f"| {size}")]
        assert row.rstrip(" |").endswith("with random weights"), row
    (seven,) = [row for row in by_size.splitlines() if row.startswith("| 7B")]
    assert "four ranks were not run" in seven


def test_the_readme_claims_no_more_of_other_trainers_than_was_run():
    (said,) = re.findall(r"([\w, ]+) were not trained with at all", page("any_trainer.md").replace("\n", " "))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    (claim,) = re.findall(r"\*\*Likelihood as a service\*\*.*?(?= - \*\*)", readme)
    assert all(name in claim for name in re.findall(r"verl|OpenRLHF|SkyRL|slime", said))
    assert "no training was run with these four" in claim and "docs/any_trainer.md#what-was-run" in claim


def test_the_readme_says_what_the_largest_training_was():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split("## What it is")[0].split())
    row = re.search(r"^\| all \| (\d+) \| (\S+) \| (\S+) \|$", page("benchmarks.md"), re.M)
    assert f"right answers on {row[1]} held-out questions from {row[2]} to {row[3]}, in one run" in readme
    by_size = section(page("gpu.md"), "Memory by model size")
    for size in ("3B", "7B"):
        assert re.search(rf"^\| {size} \|.* two steps with ", by_size, re.M)
    assert "Two steps were run of a 3B, and of a 7B with LoRA, both with random weights" in readme
    assert all(
        row.split("|")[-2].strip() == "estimated, not run"
        for row in section(page("gpu.md"), "Placement").splitlines()
        if re.match(r"\| [48]\b", row)
    )


def test_the_first_page_leads_to_the_control_plane():
    assert "add a worker" in page("index.md") and "(reliability.md#the-control-plane)" in page("index.md")


@pytest.mark.browser
@in_chromium
def test_the_search_of_the_site_finds_how_to_add_a_worker(site, browser):
    opened = browser.new_page()
    with served(site) as url:
        opened.goto(f"{url}/index.html?q=add+a+worker")
        opened.locator("#mkdocs-search-results article").first.wait_for(state="attached")
        found = opened.locator("#mkdocs-search-results article a").all()
        where = [link.get_attribute("href") for link in found[:5]]
    opened.close()
    assert any("reliability/#add-a-worker" in href for href in where), where


@pytest.mark.browser
@in_chromium
def test_on_a_phone_tables_scroll_in_frames_and_keep_columns_that_can_be_read(site, browser):
    opened = browser.new_page(viewport={"width": 390, "height": 844})
    with served(site) as url:
        opened.goto(f"{url}/monitor/")
        assert opened.locator(".wide > table").count() == opened.locator("[role=main] table").count() > 4
        assert opened.evaluate("document.documentElement.scrollWidth") == 390
        assert opened.evaluate("document.documentElement.scrollHeight") < 14_000
        narrow = opened.evaluate(
            "[...document.querySelectorAll('.wide td')]"
            ".filter(td => td.checkVisibility() && td.textContent.length > 60)"
            ".map(td => td.getBoundingClientRect().width).filter(width => width < 250).length"
        )
        assert narrow == 0
    opened.close()


@pytest.mark.browser
@in_chromium
def test_on_a_phone_every_link_of_the_first_page_is_in_sight(site, browser):
    opened = browser.new_page(viewport={"width": 390, "height": 844})
    with served(site) as url:
        opened.goto(f"{url}/")
        ends = opened.evaluate(
            "[...document.querySelectorAll('[role=main] a:not(.headerlink)')]"
            ".map(link => link.getBoundingClientRect().right)"
        )
    opened.close()
    assert len(ends) > 25 and max(ends) <= 390
