"""What commands print: whole lines in a pipe, and commands that can be typed where they are read."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run  # noqa: F401
from places import ROOT
from rich.table import Table

from retriever_service.indexing.build import build_index
from services.common.printing import commands
from services.common.printing.commands import program, typed
from services.common.printing.console import Console
from trainer.commands.checks import doctor
from trainer.commands.checks.findings import Finding
from trainer.lab.before_after import next_commands
from trainer.loop.run.progress import Progress

HINT = "note; unspiral data validate q.jsonl lists all, `unspiral runs`, unspiral --version"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder whose environment has the script, which is not on the PATH."""
    bin = tmp_path / ".venv" / "bin"
    bin.mkdir(parents=True)
    (bin / "unspiral").touch()
    monkeypatch.setattr(commands.sys, "executable", str(bin / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    return bin


def test_commands_stay_as_they_are_where_the_program_is_on_the_path(elsewhere, monkeypatch):
    (elsewhere / "unspiral").chmod(0o755)
    monkeypatch.setenv("PATH", str(elsewhere))
    assert program() == "unspiral" and typed(HINT) == HINT


def test_elsewhere_they_are_the_script_beside_the_interpreter(elsewhere, tmp_path, monkeypatch):
    assert typed(HINT) == HINT.replace("unspiral", ".venv/bin/unspiral")
    assert typed(typed(HINT)) == typed(HINT)
    for text in (
        "unspiral: no such file",
        "unspiral-health",
        "runs/unspiral runs",
        "Unspiral is",
    ):
        assert typed(text) == text
    (tmp_path / "a folder").mkdir()
    monkeypatch.chdir(tmp_path / "a folder")
    assert program() == f"{tmp_path}/.venv/bin/unspiral"


def test_without_a_script_they_are_a_module_of_the_interpreter(elsewhere):
    (elsewhere / "unspiral").unlink()
    assert typed("next: unspiral ask") == "next: .venv/bin/python -m trainer ask"


def test_a_path_with_a_blank_is_quoted(elsewhere, tmp_path, monkeypatch):
    bin = tmp_path / "my env" / "bin"
    bin.mkdir(parents=True)
    (bin / "unspiral").touch()
    monkeypatch.setattr(commands.sys, "executable", str(bin / "python"))
    assert program() == "'my env/bin/unspiral'"


def test_errors_progress_doctor_and_the_demo_name_commands_so(elsewhere, run, capsys, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").mkdir()
    (tmp_path / "runs" / "mine" / "config.yaml").touch()
    assert "; `.venv/bin/unspiral runs` lists those that are there\n" in run("report", "xyz")[2]
    out = io.StringIO()
    with Progress(3, Console(file=out)) as progress:
        progress.say("teach it first (unspiral warm-start)")
        progress.warn(["see unspiral runs"])
    assert "(.venv/bin/unspiral warm-start)\n" in out.getvalue()
    assert "\nsee .venv/bin/unspiral runs\n" in out.getvalue()
    out = io.StringIO()
    doctor.show([Finding("left", "note", "seen", "unspiral doctor --clean removes it")], Console(file=out))
    assert out.getvalue().splitlines()[1] == "      -> .venv/bin/unspiral doctor --clean removes it"
    assert all(command.startswith("unspiral ") for command in next_commands(tmp_path, tmp_path))


LONG = "pip install " + " ".join(f"package-{n}" for n in range(40))


def test_off_a_terminal_no_line_is_broken_and_none_ends_in_blanks():
    out = io.StringIO()
    console = Console(file=out)
    table = Table(title="a title that is longer than the table below it", box=None)
    for name in ("a", "b"):
        table.add_column(name)
    table.add_row("1", LONG)
    table.add_row("2", "x")
    console.print(LONG)
    console.print(table)
    console.print("piece ", end="")
    console.print("rest")
    lines = out.getvalue().split("\n")
    assert lines[0] == LONG and any(line.endswith(LONG) for line in lines[1:])
    assert [line for line in lines if line != line.rstrip()] == []
    assert lines[-2:] == ["piece rest", ""]


def test_on_a_terminal_the_console_is_rich_s():
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=60).print(LONG, highlight=False)
    assert max(map(len, out.getvalue().splitlines())) <= 60


def test_the_doctors_commands_can_be_cut_out_of_a_pipe():
    out = io.StringIO()
    doctor.show(
        [Finding("training", "note", "seen " * 40, f"not installed: torch; {LONG}")], Console(file=out)
    )
    assert out.getvalue().splitlines()[1] == f"      -> not installed: torch; {LONG}"


def test_the_doctors_findings_as_json(run, monkeypatch):
    good = Finding("Python", "good", "3.12")
    monkeypatch.setattr(doctor, "checks_of", lambda role: [lambda: iter([good])])
    for check in ("check_listeners", "check_leftovers"):
        monkeypatch.setattr(doctor, check, lambda *arguments: [])
    status, out, err = run("doctor", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == {
        "ready": True,
        "verdict": "ready for the services and for data; not for training, whose packages are not installed",
        "findings": [{"what": "Python", "level": "good", "seen": "3.12", "advice": ""}],
    }
    bad = Finding("disk", "bad", "1 GiB", "make room")
    monkeypatch.setattr(doctor, "checks_of", lambda role: [lambda: iter([bad])])
    status, out, _ = run("doctor", "--json")
    assert status == 3 and json.loads(out)["ready"] is False
    assert json.loads(out)["verdict"] == "not ready: see disk above"


def test_a_passage_that_is_found_is_one_line_in_a_pipe(tmp_path):
    text = "river " * 60
    (tmp_path / "c.jsonl").write_text(json.dumps({"id": "1", "contents": f"Title\n{text}end"}) + "\n")
    build_index(tmp_path / "c.jsonl", tmp_path / "i")
    command = [sys.executable, "-m", "trainer", "index", "search", "--index", str(tmp_path / "i"), "river"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.splitlines()[1:] == [f"   {text}end"], done.stderr


def test_the_tests_find_the_program_on_the_path():
    assert shutil.which("unspiral")


@pytest.mark.parametrize("locale", [{"LC_ALL": "C.UTF-8"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}])
def test_a_name_that_the_locale_cannot_print_ends_no_command(tmp_path, locale):
    """A folder's name that is no UTF-8, also on a machine with another encoding."""
    folder = tmp_path / "runs" / os.fsdecode(b"caf\xe9")
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    strict = {"PYTHONUTF8": "0", "PYTHONIOENCODING": ":strict", "PYTHONPATH": str(ROOT)}
    for words in (["runs"], ["report", folder, "-o", "report.html"]):
        done = subprocess.run(
            [sys.executable, "-m", "trainer", *words],
            cwd=tmp_path,
            env=os.environ | strict | locale,
            capture_output=True,
            timeout=120,
        )
        assert (done.returncode, done.stderr) == (0, b""), words
    assert "\ufffd" in (tmp_path / "report.html").read_text(encoding="utf-8")
