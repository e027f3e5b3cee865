"""Measurements on GPUs, each in one process or run so that its ratios are fair.

    python -m benchmarks.gpu learner [--shape 3b]
        packed micro-batches against padded ones; LLDS on and off
    python -m benchmarks.gpu rollout --model M --data D
        independent trajectories against a turn barrier, on the same engine
    python -m benchmarks.gpu crowd --model M --data D --workers 1 2 4
        several workers on one GPU against one
    python -m benchmarks.gpu train --model M --data D --minutes N
        warm start, a real run, exact match before and after by source
    python -m benchmarks.gpu peer --model M --data D
        a step against one of TRL's GRPOTrainer, on one GPU
    python -m benchmarks.gpu staleness --model M --data D --minutes N
        asynchronous training (rollout.max_staleness 1, 2) against on-policy at equal time; two GPUs or more
    python -m benchmarks.gpu compare BEFORE.json AFTER.json
        what became slower or larger between two results; ends with status 1 where something did

D is a folder with corpus.jsonl, train.jsonl and test.jsonl. Each prints a table last and writes
OUT/NAME.json, with the machine and the versions in it; --keep LABEL writes the same to
benchmarks/results/gpu. All run on CPU as well, with small sizes, so that a script can be tried before it
meets a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.gpu import compare, crowd, learner, peer, rollout, staleness, train
from benchmarks.gpu.machine import machine, no_room

KEPT = Path(__file__).parents[1] / "results" / "gpu"
COMMANDS = {
    "learner": learner,
    "rollout": rollout,
    "crowd": crowd,
    "train": train,
    "peer": peer,
    "staleness": staleness,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        sub = commands.add_parser(name)
        sub.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
        sub.add_argument("--keep", metavar="LABEL", help=f"also write {KEPT.name}/NAME_LABEL.json")
        module.arguments(sub)
    compare.arguments(commands.add_parser("compare"))
    args = parser.parse_args()
    if args.command == "compare":
        return compare.compare(args)
    if lacks := no_room("benchmarks.gpu"):
        return lacks
    args.out.mkdir(parents=True, exist_ok=True)
    measured = COMMANDS[args.command].run(args)
    numbers = machine() | measured
    text = json.dumps(numbers, indent=1) + "\n"
    (args.out / f"{args.command}.json").write_text(text)
    if args.keep:
        KEPT.mkdir(parents=True, exist_ok=True)
        (KEPT / f"{args.command}_{args.keep}.json").write_text(text)
    print(f"\n{', '.join(map(str, numbers['devices']))}, torch {numbers['torch']}")
    print(COMMANDS[args.command].table(numbers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
