"""`unspiral monitor replay` over anybody's metrics: names, forms of files, and what it judged by."""

from __future__ import annotations

import csv
import json

import pytest
from sick_runs import sick_run
from typer.testing import CliRunner

from services.common.errors import UserError
from services.likelihood.cli import monitor_app
from services.likelihood.exports.run_files import read_run
from services.likelihood.exports.trainers import KNOWN, MAPS, chosen_map
from services.likelihood.monitor.detectors.table import READS


def replay(*arguments) -> dict:
    done = CliRunner().invoke(monitor_app, [*map(str, arguments), "--json"])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return json.loads(done.output)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_of(trainer: str, metrics: dict) -> dict:
    """The step by a trainer's names, and without ours."""
    out = {"step": metrics["step"]}
    for ours, theirs in MAPS[trainer].names.items():
        if ours in metrics:
            out[theirs[0]] = metrics[ours]
    return out


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_json_with_a_mark_or_in_utf_16_is_read(tmp_path, encoding):
    rows = [{"step": step, "reward/mean": 0.5} for step in range(3)]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(rows), encoding=encoding)
    assert replay(path)["judged_by"] == ["reward/mean"]


def test_a_replay_names_what_it_judged_by_and_what_is_missing(tmp_path):
    rows = [{k: m[k] for k in ("step", "reward/mean", "rollout/valid")} for m in sick_run("valid to .1", 0)]
    found = replay(write_lines(tmp_path / "r.jsonl", rows))
    assert {"phases", "alarms", "judged_by", "missing"} <= set(found)
    assert found["judged_by"] == ["reward/mean", "rollout/valid"]
    assert {"probe/lag", "entropy"} <= set(found["missing"]) and not set(found["missing"]) & set(
        found["judged_by"]
    )
    assert (
        set(found["missing"]) | set(found["judged_by"])
        == KNOWN
        == {n for names in READS.values() for n in names}
    )
    (alarm,) = found["alarms"]
    assert {"rule", "metric", "since", "step", "seen", "confidence", "advice"} <= set(
        alarm
    ) and "sure" not in alarm
    assert alarm["rule"] == "validity"
    assert [p["phase"] for p in found["phases"]] == ["unknown"], "no sign of likelihood"


def test_a_file_without_any_known_metric_is_refused(tmp_path):
    path = write_lines(tmp_path / "r.jsonl", [{"step": i, "my/score": 1.0} for i in range(40)])
    with pytest.raises(
        UserError, match=r"none of its metrics is one that the monitor reads.*--map"
    ) as caught:
        replay(path)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


@pytest.mark.parametrize("trainer", MAPS)
def test_the_names_of_each_trainer_are_guessed_and_can_be_given(tmp_path, trainer):
    rows = [as_of(trainer, m) for m in sick_run("entropy to 6.6", 0)]
    path = write_lines(tmp_path / "r.jsonl", rows)
    found = replay(path)
    assert found["map"] == trainer and {a["rule"] for a in found["alarms"]} == {"entropy_high"}
    assert replay(path, "--map", trainer)["alarms"] == found["alarms"]


def test_our_own_names_are_taken_as_they_are(tmp_path):
    path = write_lines(tmp_path / "metrics.jsonl", sick_run("gradient", 0))
    found = replay(path)
    assert found["map"] is None and {a["rule"] for a in found["alarms"]} == {"gradient"}


def test_every_map_gives_names_that_some_rule_reads():
    for trainer in MAPS.values():
        assert set(trainer.names) - {"kl/ref"} <= KNOWN


def test_a_map_in_a_file(tmp_path):
    rows = [
        {"step": m["step"], "acc": m["reward/mean"], "bad": 1 - m["rollout/valid"]}
        for m in sick_run("valid to .1", 0)
    ]
    path = write_lines(tmp_path / "r.jsonl", rows)
    names = tmp_path / "names.yaml"
    names.write_text("reward/mean: [accuracy, acc]\nrollout/valid: 1 - bad\n")
    assert [a["rule"] for a in replay(path, "--map", names)["alarms"]] == ["validity"]
    for text, said in (
        ("reward/meen: acc\n", r"names\.yaml: reward/meen: no rule reads it; did you mean reward/mean\?"),
        ("reward/mean: 3\n", r"names\.yaml: reward/mean: expected the name of a metric"),
        ("[a]\n", "expected keys with values"),
    ):
        names.write_text(text)
        with pytest.raises(UserError, match=said):
            replay(path, "--map", names)
    with pytest.raises(UserError, match=r"--map vrl: no such file, and no trainer; .*did you mean verl\?"):
        replay(path, "--map", "vrl")


def test_a_trainer_state_of_hugging_face_whose_steps_come_in_parts(tmp_path):
    history = [as_of("trl", m) for m in sick_run("length x 6", 0)]
    history += [{"step": 20, "eval_loss": 0.1}, {"step": 259, "train_runtime": 3.0}]
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"global_step": 260, "log_history": history}))
    found = replay(path)
    assert found["steps"] == 260 and {a["rule"] for a in found["alarms"]} == {"length"}


def test_a_csv_export(tmp_path):
    rows = [as_of("slime", m) for m in sick_run("mismatch", 0)]
    path = tmp_path / "export.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["Step", *[k for k in rows[0] if k != "step"]])
        writer.writeheader()
        for row in rows:
            writer.writerow({"Step" if k == "step" else k: v for k, v in row.items()})
        writer.writerow({"Step": 260})
    found = replay(path)
    assert found["steps"] == 261 and {a["rule"] for a in found["alarms"]} == {"mismatch"}


@pytest.mark.parametrize("steps", [1, 260])
def test_json_lines_may_be_called_json(tmp_path, steps):
    rows = sick_run("length x 6", 0)[:steps]
    assert len(read_run(write_lines(tmp_path / "r.json", rows)).metrics) == steps


def test_verls_file_logger_nests_its_metrics(tmp_path):
    rows = []
    for m in sick_run("truncation", 0):
        named = as_of("verl", m)
        rows.append({"step": named.pop("step"), "data": named})
    found = replay(write_lines(tmp_path / "r.jsonl", rows))
    assert found["map"] == "verl" and {a["rule"] for a in found["alarms"]} == {"truncation"}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", "not JSON"),
        ("a.json", '{"x": 1}', "expected a list of objects"),
        ("a.csv", "x,y\n1,2\n", "whole number `step`"),
        ("a.csv", "step,reward/mean\n.5,2\n", "whole number `step`"),
    ],
)
def test_files_that_are_not_metrics_are_named(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said):
        read_run(tmp_path / name)


def test_no_guess_without_foreign_names():
    assert chosen_map(None, [{"step": 1, "x": 2}]) is None
