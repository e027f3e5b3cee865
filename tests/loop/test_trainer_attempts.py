"""A new attempt in the same process shows nothing of the last one's steps that come again."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_trainer_monitor_actions import Scripted, system

from services.contracts import TokenBatch
from services.likelihood.microscope.building import Lens
from trainer.loop.update.probes import FixedScores

LENS = Lens(lambda ids: "".join(f" w{i}" for i in ids), lambda trajectory: None)
UID = "000003-0000-00"


def frozen() -> FixedScores:
    """One right trajectory of step 3: a prompt of a token, an action of two."""
    tokens = TokenBatch(
        [UID],
        np.array([0, 3]),
        np.arange(3, dtype=np.int32),
        np.array([-1, 0, 0], np.int16),
        logp_old=np.array([0, -1, -1], np.float32),
        step=np.array([3]),
    )
    return FixedScores(tokens, np.array([0, -1.5, -1.5], np.float32))


def sampled(folder, question: str) -> None:
    """The trajectory as the attempt that sampled it wrote it down."""
    file = folder.path / "trajectories" / "step_000003.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"uid": UID, "question": question, "golden_answers": ["n1"]}) + "\n")


@pytest.fixture
def run(tmp_path):
    """A run's folder, and a driver that stands at its first step."""
    made = system(tmp_path)
    return made.folder, Scripted(made, {})


def test_a_frozen_answer_is_told_in_the_words_of_its_own_attempt(run):
    folder, driver = run
    microscope = driver.recorder.microscope
    sampled(folder, "asked in attempt 0")
    late = microscope.probe(frozen())  # the store's thread gets to it after the next attempt has begun
    assert microscope.probe(frozen()).records(LENS)[0].question == "asked in attempt 0"
    driver.load_state_dict(driver.first_state)
    assert driver.attempt == 1 and not (folder.path / "trajectories" / "step_000003.jsonl").exists()
    late.records(LENS)
    sampled(folder, "asked in attempt 1")
    assert microscope.probe(frozen()).records(LENS)[0].question == "asked in attempt 1"


def test_a_late_slide_leaves_no_gap_in_the_next_attempts_words(run):
    folder, driver = run
    late = driver.recorder.microscope.probe(frozen())
    driver.load_state_dict(driver.first_state)
    assert late.records(LENS)[0].question is None, "the folder holds the step no more"
    sampled(folder, "asked in attempt 1")
    assert driver.recorder.microscope.probe(frozen()).records(LENS)[0].question == "asked in attempt 1"


def test_the_status_shows_no_rewards_of_steps_that_come_again(run):
    _, driver = run
    driver.recorder.rewards.extend([0.9, 0.1])
    driver.begin_attempt()
    assert list(driver.rewards) == []
