"""Everything that needs two GPUs, planned for half an hour of one host.

    python -m benchmarks.two_gpus --out DIR [--minutes 28] [--model M --data D] [--only NAME ...]

In this order, each a process of its own with a limit: NCCL sync beside vLLM's own engine for 0.5B, 1.5B, 3B
and 7B, a worker killed and stopped in mid-broadcast, agreement on sampled text, tests/gpu, and with --model
and --data asynchronous training against on-policy at equal time. A part that the time no longer suffices for
is left out, one that fails leaves the others alone, and a table last says what ran. Output lies in
DIR/NAME.log, results in DIR/NAME.json. --cpu runs the same over gloo with tiny models, for a try.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.machine import no_room
from services.common.errors import UserError
from services.common.names import accepted

ROOT = Path(__file__).resolve().parents[1]
SIZES = ("0.5b", "1.5b", "3b", "7b")
END_SECONDS = 60.0
"""Given to a part beyond its limit, to end by itself."""


class Part(NamedTuple):
    """One measurement."""

    name: str
    command: list[str]
    seconds: float
    """Its limit."""


def parts(args: argparse.Namespace) -> list[Part]:
    """In the order of their worth."""
    on_cpu = ["--device", "cpu", "--backend", "gloo", "--engine", "transformers", "--workers", "1"]
    own = on_cpu if args.cpu else []
    sizes = ("tiny",) if args.cpu else SIZES
    planned = [
        *((f"sync_{size}", ["speed", "--sizes", size], 200.0 if size != "7b" else 300.0) for size in sizes),
        ("loss", ["loss", "--sizes", sizes[0] if args.cpu else "1.5b", "--timeout", "10"], 240.0),
        ("agreement", ["agreement", "--sizes", sizes[0], "--syncs", "2" if args.cpu else "25"], 300.0),
    ]
    found = []
    for name, command, seconds in planned:
        out = ["--limit", f"{seconds:g}", "--out", str(args.out / f"{name}.json")]
        found.append(Part(name, ["-m", "benchmarks.gpu_sync", *command, *own, *out], seconds))
    if not args.cpu:
        found.append(Part("tests", ["-m", "pytest", "-q", "tests/gpu"], 400.0))
    if args.model and args.data:
        runs = ["--model", args.model, "--data", str(args.data), "--minutes", "2.5", "--seconds", "300"]
        command = ["-m", "benchmarks.gpu", "staleness", *runs, "--out", str(args.out / "staleness")]
        found.append(Part("staleness", command, 900.0))
    return found


def chosen(args: argparse.Namespace) -> list[Part]:
    """The parts that `--only` names, or all. Raises UserError for a name that is none of them."""
    planned = parts(args)
    names = [part.name for part in planned]
    for name in args.only or ():
        if name not in names:
            without = "" if "staleness" in names else " (staleness needs --model and --data)"
            raise UserError(f"--only {name}: {accepted(name, names)}{without}")
    return [part for part in planned if not args.only or part.name in args.only]


def carry_out(part: Part, log: Path) -> str:
    """Run it, its output in a file too. Returns how it ended."""
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, *part.command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            status = f"status {process.wait(timeout=part.seconds + END_SECONDS)}"
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            status = "ended by its limit"
    return f"{status}, {time.monotonic() - began:.0f} s"


def tables(log: Path) -> str:
    """The tables at the end of a part's output, or its last lines."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    first = next((i for i, line in enumerate(lines) if ": " in line and " | " in line), None)
    return "\n".join(lines[first:] if first is not None else lines[-8:])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=28.0, help="for everything")
    parser.add_argument("--model", help="for training, warm-started")
    parser.add_argument("--data", type=Path, help="folder with corpus.jsonl, train.jsonl and test.jsonl")
    parser.add_argument("--only", nargs="+", help="names of parts, such as sync_3b")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    args.out = args.out.resolve()
    try:
        planned = chosen(args)
    except UserError as error:
        print(f"two_gpus: {error}", file=sys.stderr)
        return error.exit_code
    if lacks := no_room("two_gpus"):
        return lacks
    args.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * args.minutes
    ended: dict[str, str] = {}
    for part in planned:
        if time.monotonic() + part.seconds > until:
            ended[part.name] = "left out: too little time"
            continue
        print(f"{part.name} ...", flush=True)
        ended[part.name] = carry_out(part, args.out / f"{part.name}.log")
        print(f"{part.name}: {ended[part.name]}\n{tables(args.out / f'{part.name}.log')}\n", flush=True)
    for name, how in ended.items():
        print(f"{name:12} {how}")
    return 0 if all(how.startswith("status 0") for how in ended.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
