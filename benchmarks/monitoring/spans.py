"""What the always-on timeline costs: spans of a step measured, carried and written, over the step's duration.

    python benchmarks/monitoring/spans.py RUN [--rounds 200]

RUN is the folder of a run (`runs/demo-0`). Its newest recorded steps say how many trajectories and spans a
step has and how long it takes. Measured again here, in one process: the clock around each part, the spans'
share of pickling a step's trajectories, and `write_spans`. Target: under 1 % of the step.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from services.contracts import Question, Span, Trajectory  # noqa: E402
from trainer.loop.run.spans import FOLDER, StepClock, StepSpans, read_spans, write_spans  # noqa: E402

NEWEST = 20


def trajectories(recorded: StepSpans, with_spans: bool) -> list[Trajectory]:
    """The step's trajectories, with nothing but their spans."""
    question = Question("q", "who", ("a",), "b")
    made = []
    for one in recorded.trajectories:
        t = Trajectory(one.uid, one.uid, question, [1], [], "answer", worker=one.worker)
        if with_spans:
            t.spans = [Span(*span) for span in one.spans]
            t.round_trip = (one.asked, one.received)
        made.append(t)
    return made


def seconds(work, rounds: int) -> float:
    """Median seconds of a call."""
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def measured(count: int) -> None:
    """So many spans, one after another."""
    clock = StepClock()
    for _ in range(count):
        with clock.measure("part"):
            pass


def cost(recorded: StepSpans, folder: Path, rounds: int) -> dict[str, float]:
    """Seconds per step of each part, and their sum over the step's duration."""
    spans = len(recorded.driver) + sum(len(t.spans) for t in recorded.trajectories)
    with_spans = trajectories(recorded, True)
    without = trajectories(recorded, False)
    driver = [Span(*span) for span in recorded.driver]

    def carried(made: list[Trajectory]) -> float:
        return seconds(lambda: pickle.loads(pickle.dumps(made)), rounds)

    parts = {
        "measure_s": seconds(lambda: measured(spans), rounds),
        "carry_s": max(0.0, carried(with_spans) - carried(without)),
        "write_s": seconds(lambda: write_spans(folder, 1, 0, recorded.began, driver, with_spans), rounds),
    }
    step = recorded.ended - recorded.began
    return parts | {"step_s": step, "share": sum(parts.values()) / step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    steps = sorted(int(file.stem.rpartition("_")[2]) for file in (arguments.run / FOLDER).glob("step_*.json"))
    with tempfile.TemporaryDirectory() as made:
        found = [
            (s := read_spans(arguments.run, step), cost(s, Path(made), arguments.rounds))
            for step in steps[-NEWEST:]
        ]
    if not found:
        sys.exit(f"{arguments.run}: no spans")
    middle = {key: round(statistics.median(c[key] for _, c in found), 6) for key in found[0][1]}
    worst = max(c["share"] for _, c in found)
    size = statistics.median(len(s.trajectories) for s, _ in found)
    print(json.dumps({"steps": len(found), "trajectories": size} | middle | {"worst_share": round(worst, 6)}))


if __name__ == "__main__":
    main()
