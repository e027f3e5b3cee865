#!/usr/bin/env python3
"""Count what makes the code easy or hard to maintain.

    python .ci/house.py [REV ...]     one column per revision; without one, the working tree

It counts files, lines and lengths (of the code, without tests, benchmarks and examples), long lines, broad
folders, import circles, exceptions, string-named calls, and signal handlers and renames outside their one
file.
"""

from __future__ import annotations

import ast
import io
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("trainer", "services", "retriever_service")


def checked_out(revision: str, into: Path) -> Path:
    archive = subprocess.run(
        ["git", "archive", revision, *ROOMS], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(into, filter="data")
    return into


def module_of(root: Path, file: Path) -> str:
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def own_imports(tree: ast.Module, module: str, package: bool, known: set[str]) -> tuple[set[str], int]:
    """Modules of ours that a module imports anywhere, and the number of such imports inside functions."""
    found: set[str] = set()
    inside = 0
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    nested = {id(n) for f in functions for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                up = parts[: len(parts) - node.level + (1 if package else 0)]
                base = ".".join([*up, base] if base else up)
            names = [f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names]
        else:
            continue
        ours = {n for n in names if n.split(".")[0] in ROOMS}
        found |= ours & known
        inside += bool(ours) and id(node) in nested
    return found, inside


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected sets of two modules or more (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    out: list[list[str]] = []

    def visit(v: str) -> None:
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in graph.get(v, ()):
            if w not in index:
                visit(w)
                low[v] = min(low[v], low[w])
            elif w in stack:
                low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            part = stack[stack.index(v) :]
            del stack[stack.index(v) :]
            if len(part) > 1:
                out.append(sorted(part))

    sys.setrecursionlimit(10_000)
    for v in graph:
        if v not in index:
            visit(v)
    return out


def counts(root: Path) -> dict[str, float | int | str]:
    files = sorted(p for room in ROOMS for p in (root / room).rglob("*.py"))
    texts = {f: f.read_text(encoding="utf-8") for f in files}
    trees = {f: ast.parse(t) for f, t in texts.items()}
    lengths = {f: t.count("\n") for f, t in texts.items()}
    total = sum(lengths.values())
    per_thousand = 1000 / total
    known = {module_of(root, f) for f in files}
    graph: dict[str, set[str]] = {}
    inside = 0
    for f, tree in trees.items():
        module = module_of(root, f)
        graph[module], n = own_imports(tree, module, f.name == "__init__.py", known)
        inside += n
    nodes = [n for tree in trees.values() for n in ast.walk(tree)]
    classes = [n for n in nodes if isinstance(n, ast.ClassDef)]
    bases = {c.name: {ast.unparse(b).split(".")[-1] for b in c.bases} for c in classes}
    exceptions = {n for n, b in bases.items() if any(x.endswith(("Error", "Exception")) for x in b)}
    while more := {n for n, b in bases.items() if b & exceptions} - exceptions:
        exceptions |= more
    folders = Counter(f.parent for f in files if f.name != "__init__.py")
    lines = [line for t in texts.values() for line in t.splitlines()]
    longest = max(lengths, key=lambda f: lengths[f])

    def where(*needles: str) -> int:
        return sum(any(n in t for n in needles) for t in texts.values())

    unlike = sum(
        isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Tuple) and isinstance(n.value, ast.Tuple)
        for n in nodes
    )
    return {
        "files": len(files),
        "lines": total,
        "median file": int(statistics.median(lengths.values())),
        "longest file": f"{lengths[longest]} {longest.relative_to(root)}",
        "folders with more than 12 modules": sum(n > 12 for n in folders.values()),
        "lines over 110 columns": sum(len(line) > 110 for line in lines),
        "comment lines, %": round(100 * sum(x.lstrip().startswith("#") for x in lines) / total, 1),
        "tuple assignments per 1,000 lines": round(unlike * per_thousand, 1),
        "`except` per 1,000 lines": round(
            sum(isinstance(n, ast.ExceptHandler) for n in nodes) * per_thousand, 1
        ),
        "exception classes": len(exceptions),
        "import circles": len(circles(graph)),
        "imports of our own inside functions": inside,
        "calls of remote methods by a string": sum(t.count('call("') for t in texts.values()),
        "files that install signal handlers": where("signal.signal(", "add_signal_handler("),
        "files that rename or replace": where("os.replace(", "os.rename(", ".rename(", ".replace(target"),
    }


def main() -> None:
    columns: dict[str, dict[str, float | int | str]] = {}
    for revision in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            columns[revision] = counts(checked_out(revision, Path(folder)))
    if not columns:
        columns["working tree"] = counts(ROOT)
    print("| | " + " | ".join(columns) + " |")
    print("| --- |" + " --- |" * len(columns))
    for name in next(iter(columns.values())):
        print(f"| {name} | " + " | ".join(str(c[name]) for c in columns.values()) + " |")


if __name__ == "__main__":
    main()
