"""The timeline of a step: spans that add up, clocks that differ, and a file that trace viewers read."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from command_line import run  # noqa: F401

from services.common.errors import UserError
from services.contracts import Action, Question, Span, Trajectory
from trainer.commands.look.trace import Lanes, offset_of, trace_of
from trainer.loop.run.spans import (
    KEPT_STEPS,
    MOST_TRAJECTORIES,
    StepClock,
    StepSpans,
    TrajectorySpans,
    read_spans,
    steps_with_spans,
    write_spans,
)

QUESTION = Question("q", "who?", (), "lab")


def trajectory(uid, began, seconds, *, worker="w0.1", parts=(), clock=0.0):
    """One that the driver asked for 1 ms before it began; `clock` is what its worker's clock is ahead."""
    t = Trajectory(uid, "g", QUESTION, [1], [Action([2], [-1.0], 0, "answer", "x")], "answer", worker)
    t.spans = [Span("trajectory", began + clock, seconds), *(Span(n, b + clock, s) for n, b, s in parts)]
    t.round_trip = (began - 0.001, began + seconds + 0.001)
    return t


def check_events(trace):
    """Fields, and spans that are nested or apart in each lane. Returns the complete events."""
    events = trace["traceEvents"]
    named = {(e["pid"], e["name"]) for e in events if e["ph"] == "M"}
    complete = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} <= {"X", "M"}
    assert all(isinstance(e[k], int) and e[k] >= 0 for e in complete for k in ("ts", "dur", "pid", "tid"))
    assert {(e["pid"], "process_name") for e in complete} <= named
    lanes = {}
    for e in complete:
        lanes.setdefault((e["pid"], e["tid"]), []).append((e["ts"], -e["dur"]))
    for spans in lanes.values():
        open_ends = []
        for ts, minus in sorted(spans):
            while open_ends and open_ends[-1] <= ts + 2:
                open_ends.pop()
            assert not open_ends or ts - minus <= open_ends[-1] + 2
            open_ends.append(ts - minus)
    return complete


def test_a_step_s_spans_are_written_read_and_shown(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.jsonl").write_text("{}\n")
    clock = StepClock()
    clock.begin()
    with clock.measure("wait for rollouts"), clock.measure("learner: update"):
        pass
    began, driver = clock.end()
    assert [s.name for s in driver] == ["learner: update", "wait for rollouts"] and clock.end()[1] == []
    parts = [("generate", began + 0.1, 0.2), ("search", began + 0.3, 0.1), ("generate", began + 0.4, 0.6)]
    two = [trajectory("a", began + 0.1, 0.9, parts=parts), trajectory("b", began + 0.2, 0.3, worker="w1.1")]
    write_spans(tmp_path / "mine", 7, 2, began, driver, two)
    status, out, _ = run("trace", "mine", "7", "-o", "t.json")
    assert status == 0 and "step 7" in out and "2 trajectories on 2 workers" in out
    trace = json.loads((tmp_path / "t.json").read_text())
    complete = check_events(trace)
    assert trace["otherData"]["clocks"] == {"w0.1": "as the driver's", "w1.1": "as the driver's"}
    (a,) = (e for e in complete if e["name"] == "a")
    inside = [e for e in complete if e["args"].get("uid") == "a" and e is not a]
    assert [(e["name"], e["dur"]) for e in inside] == [
        ("generate", 200_000),
        ("search", 100_000),
        ("generate", 600_000),
    ]
    assert abs(sum(e["dur"] for e in inside) - a["dur"]) <= 2 and {e["tid"] for e in inside} == {a["tid"]}
    status, _, err = run("trace", "mine", "3")
    assert status == 2 and "there are those of steps 7 to 7" in err
    write_spans(tmp_path / "mine", 8, 2, began, driver, two)
    assert "step_000008.json: step 8, " in run("trace", "mine")[1]
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "metrics.jsonl").write_text("{}\n")
    status, _, err = run("trace", "none")
    assert status == 2 and "there are none (the newest" in err


def test_trajectories_that_overlap_lie_in_lanes_of_their_own():
    lanes = Lanes()
    spans = [(0.0, 1.0), (0.1, 2.0), (1.5, 1.0), (2.2, 0.1)]
    assert [lanes.place([Span("t", b, s), Span("g", b, s)]) for b, s in spans] == [1, 2, 1, 2]
    nested = Lanes()
    assert [nested.place([Span("s", b, s)]) for b, s in [(0, 9), (1, 3), (2, 1), (3.5, 2), (6, 1)]] == [
        1,
        1,
        1,
        2,
        1,
    ]


@pytest.mark.parametrize("ahead", [0.0, 5.0, -3600.0])
def test_a_worker_s_clock_is_corrected_by_what_cannot_come_before_what(ahead):
    """A trajectory begins after it was asked for, and is received after it ended."""
    made = [trajectory(f"t{i}", 10.0 + i, 0.5, clock=ahead) for i in range(5)]
    spans = [
        TrajectorySpans(uid=t.uid, worker="w", asked=t.round_trip[0], received=t.round_trip[1], spans=t.spans)
        for t in made
    ]
    offset = offset_of(spans)
    assert abs(offset.seconds + ahead) <= offset.within + 1e-9 and offset.within <= 0.0011
    step = StepSpans(
        step=1,
        attempt=1,
        began=9.0,
        ended=16.0,
        began_at=0.0,
        driver=[Span("update", 15, 1)],
        trajectories=spans,
    )
    trace = trace_of(step, "mine")
    begins = sorted(e["ts"] for e in check_events(trace) if e["cat"] == "trajectory")
    assert begins == pytest.approx([1_000_000 * (i + 1) for i in range(5)], abs=1100)
    said = trace["otherData"]["clocks"]["w"]
    assert said == "as the driver's" if not ahead else "right within" in said


def test_without_a_place_the_trace_lies_in_the_run_s_folder(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}\n")
    write_spans(folder, 7, 1, 0.0, [], [trajectory("a", 1.0, 0.5)])
    for given in ("mine", "latest", "runs/mine"):
        status, out, _ = run("trace", given, "7")
        assert (status, out.partition(":")[0]) == (0, "runs/mine/traces/step_000007.json")
    assert json.loads((folder / "traces" / "step_000007.json").read_text())["otherData"]["step"] == 7
    assert [entry.name for entry in tmp_path.iterdir()] == ["runs"]


def test_spans_are_bounded_and_those_of_old_steps_go(tmp_path):
    many = [trajectory(f"t{i}", 1.0, 0.5) for i in range(MOST_TRAJECTORIES + 3)]
    for step in (1, 2, KEPT_STEPS + 1):
        write_spans(tmp_path, step, 1, 0.0, [], many if step == 2 else [])
    assert steps_with_spans(tmp_path) == [2, KEPT_STEPS + 1]
    kept = read_spans(tmp_path, 2)
    assert (len(kept.trajectories), kept.left_out) == (MOST_TRAJECTORIES, 3)
    (tmp_path / "spans" / "step_000002.json").write_text('{"step": "x"}')
    with pytest.raises(UserError, match=r"step_000002.json: no file of spans"):
        read_spans(tmp_path, 2)


def test_spans_of_one_thread_are_nested_or_apart():
    clock = StepClock()
    with clock.measure("whole"):
        for name in "abc":
            with clock.measure(name):
                pass
    _, spans = clock.end()
    *parts, whole = spans
    assert all(a.began + a.seconds <= b.began for a, b in pairwise(parts))
    assert whole.began <= parts[0].began and sum(p.seconds for p in parts) <= whole.seconds
