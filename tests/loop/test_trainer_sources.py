"""Metrics by data source: of the batch that was trained on, and of the held-out questions."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from services.likelihood.exports.run_files import read_run
from trainer.loop.run import sources
from trainer.loop.run.run_outcome import RunOutcome


def test_prompts_are_counted_and_scored_by_source():
    rows = [("nq", "g0", 1.0), ("nq", "g0", 0.0), ("nq", "g1", 0.0), ("hotpot qa/dev", "g2", 1.0)]
    assert sources.training(rows) == {
        "data/nq/prompts": 2.0,
        "data/nq/em": pytest.approx(1 / 3),
        "data/hotpot_qa_dev/prompts": 1.0,
        "data/hotpot_qa_dev/em": 1.0,
    }
    assert sources.training(rows[:3]) == {}, "one source: the batch's own metrics say it"


def test_the_largest_sources_alone_get_metrics():
    scores = {f"s{i:02}": {"em": i / 100, "n": i} for i in range(50)}
    kept = sources.held_out(sources.em_of(scores), "greedy")
    assert len(kept) == sources.MOST and kept["eval/s49/em_greedy"] == 0.49
    assert sources.em_of({"nq": {"em": 1.0, "n": 3}}) == {}


def test_the_line_after_an_evaluation_holds_the_score_of_each_source():
    before = {"before/greedy": {"em": 0.1, "n": 4}}  # of a run of an earlier release
    after = {"step3/greedy": {"em": 0.5, "n": 4, "em_by_source": {"nq": 0.7, "popqa": 0.3}}}
    run = SimpleNamespace(scores=before | after)
    assert RunOutcome.held_out(run, 0) == {"eval/em_greedy": 0.1}
    assert RunOutcome.held_out(run, 3) == {
        "eval/em_greedy": 0.5,
        "eval/nq/em_greedy": 0.7,
        "eval/popqa/em_greedy": 0.3,
    }


def test_a_recorded_runs_evaluations_become_curves_of_each_source(tmp_path):
    """The last evaluation stands in the events alone; those before it in the next step's line too."""
    lines = [
        {"step": 1, "eval/em_greedy": 0.1, "eval/nq/em_greedy": 0.2},
        {"step": 2},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [
        {
            "event": "evaluation",
            "step": 0,
            "mode": "greedy",
            "overall": {"em": 0.1},
            "em_by_source": {"nq": 0.2},
        },
        {
            "event": "evaluation",
            "step": 2,
            "mode": "greedy",
            "overall": {"em": 0.5},
            "em_by_source": {"nq": 0.7},
        },
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    run = read_run(tmp_path)
    run.add_evaluations()
    assert run.metrics[0]["eval/nq/em_greedy"] == 0.2
    assert (run.metrics[1]["eval/em_greedy"], run.metrics[1]["eval/nq/em_greedy"]) == (0.5, 0.7)
