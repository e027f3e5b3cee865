"""What needs an optional package says so in one line, to whoever calls it, on the command line or not."""

import ast
import sys
from importlib import import_module

import pytest
from places import ROOT

from services.common.errors import EnvironmentLacks
from services.common.loading.extras import EXTRAS, ON_ITS_OWN

ROOMS = ("trainer", "services", "retriever_service", "unspiral_health")
OPTIONAL = {name for name, extra in EXTRAS.items() if extra != "cpu"} | {*ON_ITS_OWN}
"""All but what training needs, without which no command of it gets beyond its first line."""
BEHIND = {
    "services/likelihood/store/redis/store.py": "opening.py imports the module inside needed_for",
    "retriever_service/search/remote.py": "an index of Qdrant is opened by `connect`, which is guarded",
    "trainer/lab/demonstrations.py": "a Library is made first, which is guarded",
}
"""Files whose other imports come after a guarded one."""


def imports(tree, guarded=False):
    """(name, guarded) of each import: in `with needed_for(...)`, in `try` with `except ImportError`, or for
    types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, guarded) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module, guarded
        else:
            text = ast.unparse(node).partition("\n")[0]
            caught = isinstance(node, ast.Try) and any("ImportError" in ast.unparse(h) for h in node.handlers)
            yield from imports(node, guarded or caught or "needed_for(" in text or "TYPE_CHECKING" in text)


def test_each_import_of_an_optional_package_is_guarded():
    files = {str(f.relative_to(ROOT)): f for room in ROOMS for f in (ROOT / room).rglob("*.py")}
    bare = {}
    for name, file in files.items():
        found = [m.split(".")[0] for m, guarded in imports(ast.parse(file.read_text())) if not guarded]
        if set(found) & OPTIONAL:
            bare[name] = sorted(set(found) & OPTIONAL)
    assert set(bare) == set(BEHIND), bare


MISSING = [
    (
        "redis",
        "services.likelihood.store.opening:open_store",
        ["redis://me:hunter2@127.0.0.1:1/0"],
        "store redis://***@127.0.0.1:1/0: redis is not installed; ",
    ),
    (
        "tensorboard",
        "services.likelihood.exports.mirrors:TensorBoardMirror",
        ["t"],
        "tensorboard is not inst",
    ),
    (
        "wandb",
        "services.likelihood.exports.mirrors:WandbMirror",
        ["p"],
        "wandb is not installed: pip install",
    ),
    (
        "mlflow",
        "services.likelihood.exports.mirrors:MlflowMirror",
        ["e"],
        "mlflow is not installed: pip inst",
    ),
    (
        "mcp",
        "retriever_service.http.mcp:require_mcp",
        [],
        "--mcp needs version 2 of mcp: mcp is not installed",
    ),
    (
        "qdrant_client",
        "retriever_service.search.remote:connect",
        ["qdrant+http://h:1/c"],
        "qdrant+http://h:1/c: qdrant_client is not installed; ",
    ),
    (
        "bm25s",
        "trainer.lab.demonstrations:Library",
        [None],
        "the demo's warm start: bm25s is not installed; ",
    ),
    (
        "bm25s",
        "retriever_service.bm25.stop_words:stop_words",
        ["german"],
        "stop words of language 'german'",
    ),
]


@pytest.mark.parametrize(("package", "target", "arguments", "says"), MISSING, ids=[m[1] for m in MISSING])
def test_without_the_package_one_line_names_it_and_the_command(
    monkeypatch, tmp_path, package, target, arguments, says
):
    monkeypatch.chdir(tmp_path)
    module, _, name = target.partition(":")
    called = getattr(import_module(module), name)
    for loaded in [one for one in sys.modules if one.split(".")[0] == package or ".store.redis" in one]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EnvironmentLacks) as error:
        called(*arguments)
    line = str(error.value)
    assert line.startswith(says) and "pip install" in line and "\n" not in line
    assert error.value.exit_code == 3 and "hunter2" not in line
