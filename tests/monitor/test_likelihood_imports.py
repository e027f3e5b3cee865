"""`unspiral monitor replay` over what trackers export, over resumed runs and over two runs in one file;
and the metrics that it could not judge by."""

from __future__ import annotations

import csv
import json

import pytest
from sick_runs import healthy_run, sick_run
from sick_runs import rows as rows_of
from test_likelihood_replay import as_of, replay, write_lines
from typer.testing import CliRunner

from services.common.errors import UserError
from services.likelihood.cli import monitor_app
from services.likelihood.exports.mirrors import TensorBoardMirror
from services.likelihood.exports.run_files import read_run
from services.likelihood.exports.tables import event_files


def rules(found):
    return [alarm["rule"] for alarm in found["alarms"]]


def test_a_short_run_says_that_its_usual_levels_are_not_known(tmp_path):
    run = rows_of(healthy_run(0))[:25]
    for m in run[12:]:
        m["rollout/valid"] = 0.1
    path = write_lines(tmp_path / "r.jsonl", run)
    found = replay(path)
    assert found["doubts"]["rollout/valid"] == "25 values, and its usual level takes 30"
    assert "probe/lag" not in found["doubts"] and found["phases"][-1]["phase"] == "healthy"
    said = CliRunner().invoke(monitor_app, [str(path)]).output
    judged, _, rest = said.partition("did not have what they need:")
    assert "    likelihood         probe/lag, " in judged and "rollout/valid" not in judged
    assert "    25 values, and its usual level takes 30:\n" in rest
    assert "      validity           rollout/valid, rollout/finished\n" in rest
    assert "in doubt" not in said, "a metric is named once with its reason"


def test_a_run_that_was_sampled_every_ten_steps_says_so_too(tmp_path):
    found = replay(write_lines(tmp_path / "r.jsonl", sick_run("valid to .1", 0)[::10]))
    assert found["doubts"]["rollout/valid"] == "26 values, and its usual level takes 30"


def test_what_stops_hangs_or_cannot_be_is_named(tmp_path):
    run = rows_of(healthy_run(1))
    for m in run:
        m["rollout/truncated"] *= 100
        m["probe/fixed"] = -0.05
        m["entropy"] = None if m["step"] > 100 else m["entropy"]
    doubts = replay(write_lines(tmp_path / "r.jsonl", run))["doubts"]
    assert doubts["rollout/truncated"].endswith("values are not between 0 and 1: another unit?")
    assert doubts["probe/fixed"] == "the same value at every step"
    assert doubts["entropy"] == "no value after step 100"
    assert "eval/em_greedy" not in doubts, "every 20 steps is often enough"


def test_a_whole_healthy_run_leaves_no_doubt(tmp_path):
    assert replay(write_lines(tmp_path / "r.jsonl", rows_of(healthy_run(2))))["doubts"] == {}


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.jsonl"])
def test_a_resumed_run_takes_the_place_of_what_it_does_again(tmp_path, name):
    first, again = rows_of(healthy_run(3, 150)), rows_of(healthy_run(4, 150))
    path = write_lines(tmp_path / name, first + again[50:80])
    found = read_run(path).metrics
    assert [m["step"] for m in found] == list(range(80))
    assert found[49] == first[49] and found[50] == again[50]


def test_two_runs_in_one_file_are_refused(tmp_path):
    both = zip(rows_of(healthy_run(1))[:40], sick_run("valid to .1", 2)[:40], strict=True)
    path = write_lines(tmp_path / "r.jsonl", [m for pair in both for m in pair])
    with pytest.raises(UserError, match="two runs in one file, or several rows per step") as caught:
        replay(path)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_parts_of_a_step_from_two_loggers_are_no_second_run(tmp_path):
    run = sick_run("valid to .1", 0)
    one = [{"step": m["step"], "reward/mean": m["reward/mean"], "time": m["step"]} for m in run]
    other = [{"step": m["step"], "rollout/valid": m["rollout/valid"], "time": -m["step"]} for m in run]
    for mixed in (one + other, [m for pair in zip(one, other, strict=True) for m in pair]):
        found = replay(write_lines(tmp_path / "r.jsonl", mixed))
        assert found["steps"] == 260 and rules(found) == ["validity"]


def in_parts(run):
    """A step in three rows; the first of them is the same in each attempt."""
    for m in run:
        yield {"step": m["step"], "lr": 1e-6}
        yield {"step": m["step"], "entropy": m["entropy"]}
        yield {"step": m["step"], "reward/mean": m["reward/mean"]}


def test_a_processs_tenth_file_of_events_is_younger_than_its_ninth(tmp_path):
    ages = [(99, 11), (100, 9), (100, 10), (101, 0)]
    names = [f"events.out.tfevents.{second}.host-2.77.{count}" for second, count in ages]
    for name in reversed(names):
        (tmp_path / name).touch()
    assert [file.name for file in event_files(tmp_path)] == names


@pytest.mark.parametrize("kind", ["events", "lines"])
@pytest.mark.parametrize("last", [70, 93])
def test_a_run_in_parts_that_was_resumed_takes_the_place_of_what_it_does_again(tmp_path, kind, last):
    first, again = rows_of(healthy_run(3, 100)), rows_of(healthy_run(4, 100))
    path = tmp_path / "mine"
    if kind == "events":
        pytest.importorskip("tensorboard")
        for attempt in (first, again[last - 20 : last]):
            mirror = TensorBoardMirror(tmp_path)
            for m in in_parts(attempt):
                mirror.step("mine", m["step"], 1.0, {k: v for k, v in m.items() if k != "step"}, None)
            mirror.close()
    else:
        path = write_lines(tmp_path / "log.jsonl", in_parts(first + again[last - 20 : last]))
    found = read_run(path).metrics
    assert [m["step"] for m in found] == list(range(last)), "no step of the attempt before stays"
    wanted = first[: last - 20] + again[last - 20 : last]
    for name in ("entropy", "reward/mean"):
        assert [m[name] for m in found] == pytest.approx([m[name] for m in wanted])


def test_two_runs_in_parts_are_refused(tmp_path):
    both = zip(rows_of(healthy_run(1))[:40], sick_run("valid to .1", 2)[:40], strict=True)
    path = write_lines(tmp_path / "r.jsonl", in_parts([m for pair in both for m in pair]))
    with pytest.raises(UserError, match="two runs in one file"):
        replay(path)


@pytest.mark.parametrize("empty", [None, float("nan")])
def test_a_table_with_a_null_where_nothing_was_logged(tmp_path, empty):
    run = rows_of(healthy_run(5))
    table = [{**m, "grad_norm": m["grad_norm"] if m["step"] % 10 == 0 else empty} for m in run]
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(m) + "\n" for m in table))
    assert rules(replay(path)) == []
    for m in table[200:]:
        m["grad_norm"] = empty
    path.write_text("".join(json.dumps(m) + "\n" for m in table))
    assert rules(replay(path)) == ["nonfinite"], "one that ends in nulls may have broken"


def chart(path, run, *names):
    """As Weights & Biases exports charts: a column per run and metric, with the bounds of its band."""
    columns = [
        f"{name} - {key}{end}"
        for name in names
        for key in run[0]
        if key != "step"
        for end in ("", "__MIN", "__MAX")
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["Step", *columns])
        writer.writeheader()
        for m in run:
            cells = {c: m.get(c.split(" - ")[1].removesuffix("__MIN").removesuffix("__MAX")) for c in columns}
            writer.writerow({"Step": m["step"], **{c: v for c, v in cells.items() if v is not None}})
    return path


def test_a_chart_of_weights_and_biases(tmp_path):
    run = [as_of("trl", m) for m in sick_run("length x 6", 0)]
    found = replay(chart(tmp_path / "chart.csv", run, "sweet-sun-7"))
    assert found["map"] == "trl" and rules(found) == ["length"]
    with pytest.raises(UserError, match=r"columns of 2 runs \(a, b\); export one run"):
        replay(chart(tmp_path / "two.csv", run[:3], "a", "b"))


def test_the_event_files_of_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    mirror = TensorBoardMirror(tmp_path)
    for m in sick_run("mismatch", 0):
        mirror.step("mine", m["step"], 1.0, {k: v for k, v in m.items() if k != "step"}, None)
    mirror.close()
    found = replay(tmp_path / "mine")
    assert found["steps"] == 260 and rules(found) == ["mismatch"]
    (file,) = (tmp_path / "mine").iterdir()
    assert replay(file)["alarms"] == found["alarms"]


def test_a_csv_of_tensorboard_does_not_say_what_it_holds(tmp_path):
    (tmp_path / "a.csv").write_text("Wall time,Step,Value\n1.0,1,0.5\n")
    with pytest.raises(UserError, match="holds one metric and not its name"):
        replay(tmp_path / "a.csv")
