"""The probes: which trajectories are scored again, and that their numbers go back where they belong."""

import threading
import time

import numpy as np
import pytest

from services.contracts import TokenBatch
from services.settings import ProbeSettings
from trainer.loop.update import probes as module
from trainer.loop.update.probes import FREEZE_BY_STEP, Probes


class Store:
    """Token arrays of past steps, as the likelihood client serves them."""

    def __init__(self):
        self.steps = {}
        self.answers = threading.Event()
        self.answers.set()
        self.asked = []

    def get_tokens(self, run, step, timeout_seconds=None):
        self.asked.append((step, timeout_seconds))
        assert self.answers.wait(60)
        return self.steps.get(step)


def batch(step, lengths, right):
    n = sum(lengths)
    return TokenBatch(
        [f"{step}-{i}" for i in range(len(lengths))],
        np.cumsum([0, *lengths]),
        np.arange(n, dtype=np.int32),
        np.zeros(n, np.int16),
        logp_old=np.full(n, -1.0, np.float32),
        right=np.asarray(right),
    )


@pytest.fixture
def store():
    return Store()


def test_displacement_goes_back_to_the_rows_that_were_scored(store, tmp_path):
    probes = Probes(ProbeSettings(displacement_size=2, fixed_size=0), store, "r", tmp_path)
    b = batch(1, [2, 3, 1], [False, False, False])
    parts = probes.parts(1, b)
    joined = TokenBatch.joined(list(parts.values()))
    assert joined.uid == ["1-0", "1-2"]
    read = probes.read(b, parts, np.asarray([-2.0, -3.0, -4.0], np.float32))
    assert read.rows == [0, 2]
    np.testing.assert_array_equal(read.logp_new, np.asarray([-2, -3, np.nan, np.nan, np.nan, -4], np.float32))


def test_of_a_large_batch_whole_groups_are_scored_again(store, tmp_path):
    probes = Probes(ProbeSettings(displacement_size=7, fixed_size=0), store, "r", tmp_path, group_size=3)
    whole = batch(1, [2] * 12, [False] * 12)
    part = probes.parts(1, whole)["displacement"]
    assert [whole.uid.index(uid) for uid in part.uid] == [0, 1, 2, 9, 10, 11]


def test_the_lag_probe_is_the_mean_change_a_token_of_earlier_right_trajectories(store, tmp_path):
    store.steps[3] = batch(3, [2, 2, 4], [True, False, True])
    probes = Probes(ProbeSettings(lag_steps=5, fixed_size=0), store, "r", tmp_path)
    b = batch(8, [1], [False])
    parts = probes.parts(8, b)
    assert parts["lag"].uid == ["3-0", "3-2"]
    logp = np.concatenate([np.zeros(1), np.asarray([-1.5, -1.5, -1.25, -1.25, -1.25, -1.25])]).astype(
        np.float32
    )
    assert probes.read(b, parts, logp).metrics["probe/lag"] == pytest.approx((2 * -0.5 + 4 * -0.25) / 6)
    assert "lag" not in probes.parts(5, b), "no step 0"
    assert "lag" not in probes.parts(9, b), "step 4 is not in the store"


def test_a_store_that_hangs_costs_one_short_wait_and_is_missing(store, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ASK_SECONDS", 0.3)
    for step in range(1, 9):
        store.steps[step] = batch(step, [2], [True])
    probes = Probes(ProbeSettings(lag_steps=1, fixed_size=0), store, "r", tmp_path)
    store.answers.clear()
    waits = []
    for step in (2, 3, 4):
        probes.ask(step)
        began = time.monotonic()
        parts = probes.parts(step, batch(step, [2], [True]))
        waits.append(time.monotonic() - began)
        assert "lag" not in parts and "has not answered for" in probes.missing
        metrics = probes.read(batch(step, [2], [True]), parts, np.zeros(2, np.float32)).metrics
        assert metrics == {"probe/lag_missed": step - 1}
        monkeypatch.setattr(module, "ASK_SECONDS", 60.0)  # of the first question alone
    assert max(waits) < 30
    assert store.asked == [(1, 0.3)], "nothing more is asked while an answer is awaited"
    store.answers.set()
    probes._answer.result(60)
    probes.ask(5)
    probes._answer.result(60)
    assert "lag" in probes.parts(5, batch(5, [2], [True])) and probes.missing is None and probes.missed == 3


def test_arrays_that_the_store_does_not_have_or_of_another_trainer_are_no_error(store, tmp_path):
    probes = Probes(ProbeSettings(lag_steps=1, fixed_size=0), store, "r", tmp_path)
    assert "lag" not in probes.parts(5, batch(5, [2], [True]))
    assert probes.missing == "the likelihood service gave no token arrays of step 4"
    store.steps[5] = batch(5, [2], [True])
    store.steps[5].right = None
    assert "lag" not in probes.parts(6, batch(6, [2], [True])) and probes.missing is None


def test_a_right_answer_that_the_update_pushes_down_is_not_probed(store, tmp_path):
    store.steps[3] = batch(3, [2, 2, 4], [True, True, False])
    store.steps[3].advantages = np.asarray([-0.5, 0.0, 0.5], np.float32)
    probes = Probes(ProbeSettings(lag_steps=5, fixed_size=0), store, "r", tmp_path)
    assert probes.parts(8, batch(8, [1], [False]))["lag"].uid == ["3-1"]


def test_the_fixed_set_is_frozen_once_full_and_survives_a_resume(store, tmp_path):
    settings = ProbeSettings(fixed_size=3)
    probes = Probes(settings, store, "r", tmp_path)
    assert "fixed" not in probes.parts(1, batch(1, [1, 1], [True, False]))
    assert probes.parts(2, batch(2, [1, 1, 1], [True, True, True]))["fixed"].uid == ["1-0", "2-0", "2-1"]
    assert probes.parts(3, batch(3, [1], [True]))["fixed"].uid == ["1-0", "2-0", "2-1"]
    resumed = Probes(settings, store, "r", tmp_path)
    resumed.restore(3)
    assert resumed.fixed.uid == ["1-0", "2-0", "2-1"]
    earlier = Probes(settings, store, "r", tmp_path)
    earlier.restore(1)
    assert earlier.fixed.uid == ["1-0"]
    assert earlier.parts(2, batch(2, [1, 1, 1], [True, True, True]))["fixed"].uid == ["1-0", "2-0", "2-1"]


def test_the_fixed_set_closes_after_some_steps_however_small(store, tmp_path):
    probes = Probes(ProbeSettings(fixed_size=100), store, "r", tmp_path)
    for step in range(1, FREEZE_BY_STEP + 1):
        assert "fixed" not in probes.parts(step, batch(step, [1], [True]))
    after = probes.parts(FREEZE_BY_STEP + 1, batch(FREEZE_BY_STEP + 1, [1], [True]))
    assert len(after["fixed"]) == FREEZE_BY_STEP


def test_the_tags_of_the_fixed_set_are_looked_at_under_the_weights_of_now(store, tmp_path):
    pieces = ["<think>", " Po ", "</think>", "<answer>"]
    for decode, expected in ((lambda ids: "".join(pieces[i] for i in ids), -2.0), (lambda ids: "x", None)):
        probes = Probes(ProbeSettings(fixed_size=2), store, "r", tmp_path, decode)
        b = batch(1, [3, 1], [True, True])
        parts = {"fixed": probes.parts(1, b)["fixed"]}
        read = probes.read(b, parts, np.asarray([-1.0, -9.0, -3.0, -2.0], np.float32))
        assert read.metrics == {"probe/fixed": -3.75} | (
            {} if expected is None else {"probe/control": expected}
        )


def test_no_probe_between_its_steps(store, tmp_path):
    probes = Probes(ProbeSettings(every=2), store, "r", tmp_path)
    b = batch(1, [1], [True])
    assert probes.parts(1, b) == {}
    assert probes.read(b, {}, np.zeros(0, np.float32)).rows == []
    assert "displacement" in probes.parts(2, b)


def test_where_the_weights_did_not_move_the_batch_is_not_scored_again(store, tmp_path):
    store.steps[3] = batch(3, [2], [True])
    probes = Probes(ProbeSettings(lag_steps=5, fixed_size=0), store, "r", tmp_path)
    b = batch(8, [1, 2], [True, False])
    parts = probes.parts(8, b, moved=False)
    assert list(parts) == ["lag"]
    assert probes.read(b, parts, np.zeros(2, np.float32)).rows == []
