"""All BM25 engines over one corpus, in one run, and their rows of the table in docs/benchmarks.md.

    python -m benchmarks.bm25_rivals CORPUS QUESTIONS WORK [--rivals PYTHON] [--engines packed lucene ...]
        [--seconds 1800] [--out RESULT.json]

Each engine is a process of its own (`benchmarks.bm25_sizes`): ours by this Python, the others by PYTHON,
where bm25s, tantivy or pyserini are installed. One line of JSON per engine, with the load of the machine
before and after it, and at the end the rows. What does not end within `--seconds` is left out and said. WORK
holds one index at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.bm25_sizes import ENGINES
from benchmarks.retriever import machine, tell
from services.common.files import write_json

NAMES = {
    "packed": "ours, packed",
    "bm25s-format": "ours, bm25s format",
    "bm25s": "bm25s {version}",
    "tantivy": "tantivy {version}",
    "lucene": "Lucene (pyserini {version})",
}
OURS = ("packed", "bm25s-format")


def measured(engine: str, python: str, args: argparse.Namespace) -> dict | None:
    """The line of `benchmarks.bm25_sizes`; None where it failed, which is said."""
    shutil.rmtree(args.work, ignore_errors=True)
    command = [python, "-m", "benchmarks.bm25_sizes", engine]
    command += [str(path) for path in (args.corpus, args.questions, args.work)]
    before = os.getloadavg()[0]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).resolve().parents[1], stdout=subprocess.PIPE, text=True,
            timeout=args.seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        tell("left out", {"engine": engine, "why": f"not done within {args.seconds:.0f} s"})
        return None
    finally:
        shutil.rmtree(args.work, ignore_errors=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        tell("left out", {"engine": engine, "why": f"status {done.returncode}; its words are above"})
        return None
    return json.loads(lines[-1]) | {"load": [round(before, 1), round(os.getloadavg()[0], 1)]}


def row_of(found: dict, passages: int) -> str:
    """Its row of the table."""
    name = NAMES[found["engine"]].format(version=found["version"])
    return (
        f"| {passages:,} | {name} | {found['cpu_ms']:.3f} | {found['cpu_p50_ms']:.3f} | "
        f"{found['cpu_p99_ms']:.2f} | {found['bytes'] / 1e6:,.0f} | {found['build_cpu_seconds']:,.0f} | "
        f"{found['build_peak_mib']:,} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--rivals", default=sys.executable, help="the Python of the other engines")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=[*ENGINES])
    parser.add_argument("--seconds", type=float, default=1800, help="at most, for each engine")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with args.corpus.open("rb") as file:
        passages = sum(1 for _ in file)
    tell("machine", {"name": machine(), "passages": passages})
    kept = []
    for engine in args.engines:
        found = measured(engine, sys.executable if engine in OURS else args.rivals, args)
        if found is not None:
            kept.append(found | {"passages": passages, "row": row_of(found, passages)})
            tell("engine", found)
        if args.out is not None:
            write_json(args.out, {"machine": machine(), "engines": kept}, indent=1)
    print("\n".join(found["row"] for found in kept))


if __name__ == "__main__":
    main()
