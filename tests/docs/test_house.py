"""The lines between the rooms, as a plain install meets them."""

import ast
import re
import subprocess
import sys

import pytest
from places import ROOT

from services.common.loading.extras import how_to_install
from trainer.commands.cli import COMMANDS

BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""

TEXTS = (".py", ".md", ".js", ".css", ".html", ".sh", ".yaml", ".yml", ".toml", ".json", ".Dockerfile")


def without(absent, code):
    """Run code in a fresh interpreter in which the named packages cannot be imported."""
    script = BLOCK.format(absent=set(absent)) + code
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


HEAVY = (
    "torch",
    "ray",
    "vllm",
    "deepspeed",
    "transformers",
    "redis",
    "faiss",
    "sentence_transformers",
    "pandas",
)


PLAIN = (
    "retriever_service.http.server",
    "retriever_service.client",
    "retriever_service.cli",
    "services.common.http.auth",
    "services.common.http.serving",
    "services.control.cli",
    "services.control.launch",
    "services.control.gateway",
    "services.likelihood.rest.server",
    "services.likelihood.rest.launch",
    "services.likelihood.client",
    "services.likelihood.exports.report",
    "services.contracts",
    "services.settings",
    "trainer.commands.cli",
    "trainer.config.schema",
    "trainer.commands.checks.doctor",
)


def test_a_plain_install_imports():
    code = """
import importlib
import traceback
for module in {modules!r}:
    try:
        importlib.import_module(module)
    except Exception:
        print(module, traceback.format_exc())
"""
    done = without(HEAVY, code.format(modules=PLAIN))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_plain_install_runs_the_light_commands():
    commands = [["--help"], ["index", "--help"], ["serve", "retriever", "--help"], ["config", "schema"]]
    code = """
import contextlib
import io
from trainer.commands.cli import main
for command in {commands!r}:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            main(command)
            status = 0
        except SystemExit as ended:
            status = ended.code
    print(*command, "ended with", status or 0, "and said", bool(said.getvalue().strip()))
"""
    done = without(HEAVY, code.format(commands=commands))
    expected = [f"{' '.join(command)} ended with 0 and said True" for command in commands]
    assert done.stdout.splitlines() == expected, done.stderr


def test_a_plain_install_shows_every_help_page():
    code = """
from trainer.commands.cli import COMMANDS, main
for name in COMMANDS:
    try:
        main([name, "--help"])
    except SystemExit as end:
        assert end.code == 0, name
"""
    done = without(HEAVY, code)
    assert done.returncode == 0, done.stderr
    assert [name for name in COMMANDS if f"Usage: unspiral {name} " not in done.stdout] == []


def test_a_command_that_needs_an_extra_says_which(tmp_path):
    config = tmp_path / "c.yaml"
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "who?", "golden_answers": ["a"]}\n')
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "a", "contents": "b"}\n')
    files = f"data: {{train: {questions}}}, retriever: {{corpus: {corpus}}}"
    config.write_text(f"{{model: {{path: {tmp_path}}}, {files}}}")
    done = without(
        HEAVY, f"from trainer.commands.cli import main; main(['train', '--config', {str(config)!r}])"
    )
    assert done.returncode == 3
    # Whichever of them is imported first is named; one extra brings both.
    assert re.search(
        rf"unspiral: (ray|torch) is not installed; {re.escape(how_to_install('cpu'))}", done.stderr
    )
    assert "Traceback" not in done.stderr


def test_a_part_of_the_code_that_is_gone_is_not_called_an_extra():
    """As where Ray nodes that share a /tmp unpack a job's code over each other."""
    code = """
import sys
from trainer.commands import cli
def gone():
    raise ModuleNotFoundError("No module named 'services.launcher'", name="services.launcher")
cli.app = lambda **_: gone()
cli.main([])
"""
    done = without((), code)
    assert done.returncode == 3 and "pip install" not in done.stderr
    assert f"services.launcher is a part of Unspiral and is not in {ROOT}" in done.stderr


def test_algorithms_import_nothing_but_torch():
    pytest.importorskip("torch")
    done = without([p for p in HEAVY if p != "torch"], "import trainer.algorithms")
    assert done.returncode == 0, done.stderr


def test_files_stay_small_enough_to_read():
    long = [
        f"{p.relative_to(ROOT)}: {n}"
        for room in ("trainer", "services", "retriever_service", "unspiral_health", "tests")
        for p in sorted((ROOT / room).rglob("*.py"))
        if (n := len(p.read_text(encoding="utf-8").splitlines())) > 450
    ]
    assert long == []


def test_every_folder_of_modules_is_a_package():
    """Import-linter does not see the modules of another folder, and holds no rule for them."""
    rooms = (ROOT / room for room in ("trainer", "services", "retriever_service", "unspiral_health"))
    folders = {p.parent for room in rooms for p in room.rglob("*.py")}
    assert len(folders) > 50
    assert [str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


def test_no_file_holds_the_marks_of_a_merge():
    places = [ROOT, *(ROOT / room for room in ("docs", "deploy", "examples", "benchmarks", ".ci"))]
    places += [ROOT / room for room in ("trainer", "services", "retriever_service", "tests")]
    files = {p for place in places for p in (place.glob("*") if place == ROOT else place.rglob("*"))}
    texts = sorted(p for p in files if p.is_file() and p.suffix in TEXTS)
    assert len(texts) > 1000
    marks = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    assert [str(p) for p in texts if marks.search(p.read_text(encoding="utf-8", errors="replace"))] == []


def test_no_module_imports_itself_by_way_of_others():
    done = subprocess.run(
        [sys.executable, ".ci/house.py"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    counted = dict(line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:])
    assert counted["import circles"] == "0"
    assert counted["files that install signal handlers"] == "1"
    assert counted["files that rename or replace"] == "1"


OURS = ("services", "trainer", "retriever_service")
BY_NAME = {
    "services/common/loading/lazy.py",
    "services/common/loading/user_code.py",
    "services/likelihood/cli.py",
    "services/likelihood/store/opening.py",
    "services/rollout/engines/vllm_engine.py",
}
"""Modules that are imported when they are used, code of users, the likelihood service and its Redis store,
which the thin wheel lacks, and the engine, whose extension of vLLM must not be imported without it."""


def own_imports_in_functions(file):
    """`line: module` of each import of our own packages inside a function, and of each use of importlib."""
    for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "."]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif "import_module" in (getattr(node, "attr", ""), getattr(node, "id", "")):
                names = ["services (by importlib)"]
            yield from (f"{node.lineno}: {name}" for name in names if name.split(".")[0].split()[0] in OURS)


def test_no_function_imports_our_own_packages():
    found = {}
    for room in OURS:
        for file in sorted((ROOT / room).rglob("*.py")):
            name = str(file.relative_to(ROOT))
            if imports := set(own_imports_in_functions(file)):
                found[name] = imports
    assert found.keys() <= BY_NAME, found


def test_the_list_of_commands_imports_none_of_them():
    code = (
        "import sys\nfrom trainer.commands.cli import main\ntry:\n    main(['--help'])\n"
        "except SystemExit:\n    print(sorted(m for m in sys.modules if m.endswith(('.cli', '.runs')) or "
        "m in ('pydantic', 'numpy', 'fastapi', 'ray', 'torch')), file=sys.stderr)"
    )
    done = without((), code)
    assert done.stderr.strip() == "['trainer.commands.cli']"
    for name, entry in COMMANDS.items():
        assert f" {name} " in done.stdout and entry.help.endswith("."), name
