"""A run's summary counts the held-out score of its last step's weights, which no line of metrics has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from services.likelihood.monitor.phases import PhaseMonitor
from trainer.config.schema import Config
from trainer.loop.run.run_outcome import RunOutcome

TWO = "2 values of the held-out score, and 3 are needed"


@pytest.mark.parametrize(
    ("lines_with", "scored_at", "why"),
    [
        (1, 3, TWO),
        (1, 2, "1 value of the held-out score, and 3 are needed"),
        (2, 3, f"{TWO}; one more came after the last step"),
    ],
)
def test_the_last_evaluation_is_counted(tmp_path, lines_with, scored_at, why):
    monitor = PhaseMonitor()
    for step in (1, 2, 3):
        score = {"eval/em_greedy": 0.2} if step <= lines_with else {}
        monitor.update({"step": step, "reward/mean": 0.5, **score})
    run = SimpleNamespace(
        step=3,
        monitor=monitor,
        scores={"after/greedy": {"em": 0.4, "step": scored_at}},
        folder=SimpleNamespace(metrics_path=tmp_path / "metrics.jsonl"),
        config=SimpleNamespace(trainer=Config.model_fields["trainer"].annotation()),
        best=SimpleNamespace(score=None, why_to_end=lambda settings: None),
        learner_ranks=1,
    )
    (tmp_path / "metrics.jsonl").write_text("")
    assert RunOutcome.summary(run)["undecided"]["reward_gap"] == why
