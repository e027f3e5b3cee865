"""How a run ends before its time: signals, a lost learner, a step cut short. Scripted steps on a real run
folder, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest
from scripted_runs import Halting, checkpoints, listened, quick, send, started, summary, trained  # noqa: F401
from test_trainer_monitor_actions import Scripted, rollback, system

from services.common.processes import signals
from trainer.learner.checkpoint import CheckpointNotWritten
from trainer.learner.group import LearnerError
from trainer.session import run as runs
from trainer.session import stopping
from trainer.session.stopping import StopSignals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_ends_the_run_after_the_step_in_hand_with_its_checkpoint(tmp_path, number, code):
    made = system(tmp_path)
    driver = Halting(made, 3, lambda d: send(number))
    with pytest.raises(signals.Stopped) as caught:
        asyncio.run(listened(driver))
    assert caught.value.exit_code == code
    assert made.folder.last_step() == 3 and checkpoints(made) == ["step_000002", "step_000003"]


def test_a_second_signal_cuts_the_step_short_and_nothing_half_done_is_saved(tmp_path):
    made = system(tmp_path)

    async def twice(driver):
        await send(signal.SIGTERM)
        await send(signal.SIGINT)
        raise AssertionError("goes on after the second signal")

    with pytest.raises(signals.Stopped) as caught:
        asyncio.run(listened(Halting(made, 4, twice)))
    assert caught.value.exit_code == 143  # the first one's
    assert made.folder.last_step() == 3 and checkpoints(made) == ["step_000002"]


def test_a_step_that_does_not_end_within_the_grace_is_cut_short(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "STEP_GRACE_SECONDS", 0.05)
    made = system(tmp_path)

    async def stuck(driver):
        await send(signal.SIGTERM)
        await asyncio.sleep(30)

    with pytest.raises(signals.Stopped):
        asyncio.run(listened(Halting(made, 4, stuck)))
    assert checkpoints(made) == ["step_000002"]


def test_the_grace_ends_with_the_step(tmp_path):
    """Its timer must not cut what comes after: the checkpoint."""
    made, timers = system(tmp_path), []
    save = made.learner.save

    def watched(path, state):
        timers.append(driver.stop._timer)
        save(path, state)

    async def halted(driver):
        await send(signal.SIGTERM)
        timers.append(driver.stop._timer)

    made.learner.save = watched
    made.config.trainer.checkpoint_every = 0
    driver = Halting(made, 3, halted)
    with pytest.raises(signals.Stopped):
        asyncio.run(listened(driver))
    in_the_step, in_the_save = timers
    assert in_the_step.cancelled() and in_the_save is None
    assert checkpoints(made) == ["step_000003"]


@pytest.mark.parametrize("signal_first", [True, False])
def test_of_two_limits_of_a_step_the_shorter_one_holds_and_ends_with_the_step(tmp_path, signal_first):
    """A signal and Ray's death in one step: a timer that is left over would cut what comes after."""
    said = []

    async def both():
        with StopSignals(said.append) as stop:
            asks = [
                lambda: stop.receive(signal.SIGTERM),
                lambda: stop.end_soon(OSError("Ray has died"), 0.05),
            ]
            with stop.step_in_hand():
                for ask in asks if signal_first else asks[::-1]:
                    ask()
            await asyncio.sleep(0.15)  # the step came to its end in time
            with stop.step_in_hand(), pytest.raises(asyncio.CancelledError):
                for ask in asks[1:]:
                    stop.error = None
                    ask()
                await asyncio.sleep(30)

    asyncio.run(both())
    assert "the step is not done after 0.05 s: stopping" in said
    assert sum("not done" in line for line in said) == 1


@pytest.mark.parametrize("when", ["in the step", "in the save"])
def test_the_grace_does_not_cut_the_checkpoint_that_is_due_after_the_step(tmp_path, monkeypatch, when):
    """The save would go on in the learner, and be asked for once more."""
    monkeypatch.setattr(stopping, "STEP_GRACE_SECONDS", 1.0)
    made, asked, over = system(tmp_path), [], threading.Event()
    save, end_of_grace = made.learner.save, StopSignals._end_of_grace

    def ends(stop, *of):
        end_of_grace(stop, *of)
        over.set()

    def slow(path, state):
        asked.append(path.name)
        if when == "in the save":  # no grace begins, so nothing ends it
            os.kill(os.getpid(), signal.SIGTERM)
            over.wait(1.5)
        else:
            assert over.wait(60)
        save(path, state)

    monkeypatch.setattr(StopSignals, "_end_of_grace", ends)
    made.learner.save = slow
    driver = Halting(made, 2, lambda d: send(signal.SIGTERM)) if when == "in the step" else Scripted(made, {})
    with pytest.raises(signals.Stopped):
        asyncio.run(listened(driver))
    assert asked == checkpoints(made) == ["step_000002"] and made.folder.last_step() == 2


def test_a_signal_while_the_last_steps_are_saved_waits_for_them(tmp_path):
    made = system(tmp_path)
    save = made.learner.save

    def slow(path, state):
        if path.name == "step_000012":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
        save(path, state)

    made.learner.save = slow
    made.config.trainer.checkpoint_every = 5
    driver = Scripted(made, {})

    async def run():
        with pytest.raises(signals.Stopped):
            await listened(driver)
        return checkpoints(made)  # when the run's parts are ended, the learner among them

    assert asyncio.run(run()) == ["step_000005", "step_000010", "step_000012"]


def test_where_no_step_is_in_hand_the_first_signal_ends_the_run_at_once(tmp_path):
    made = system(tmp_path)
    driver = Scripted(made, {})

    async def evaluate(tag):
        await send(signal.SIGTERM)
        raise AssertionError("goes on after the signal")

    driver.evaluations.run, driver.config.trainer.eval_at_ends = evaluate, True
    with pytest.raises(signals.Stopped):
        asyncio.run(listened(driver))
    assert driver.trace == []


def test_signals_do_not_cut_the_clean_end_short(tmp_path):
    async def ends():
        with StopSignals(print) as stop:
            stop.settle()
            await send(signal.SIGTERM)
            return "whole"

    assert asyncio.run(ends()) == "whole"


def test_a_closed_terminal_ends_a_run_cleanly_but_not_under_nohup(tmp_path):
    async def ends():
        with StopSignals(print) as stop:
            try:
                await send(signal.SIGHUP)
                await asyncio.sleep(0.2)
            except asyncio.CancelledError:
                return stop.number
            return "goes on"

    assert signals.Stopped(signal.SIGHUP).exit_code == 129
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        assert asyncio.run(ends()) == signal.SIGHUP
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert asyncio.run(ends()) == "goes on"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nothing_is_left_that_would_end_the_process_later(tmp_path):
    async def ends():
        with StopSignals(print) as stop:
            stop.abort(RuntimeError("stuck"))
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(10)
            stop.settle()

    asyncio.run(ends())
    assert not [
        t for t in threading.enumerate() if isinstance(t, threading.Timer) and not t.finished.is_set()
    ]


def test_a_lost_learner_is_not_asked_to_save(tmp_path):
    made, saved = system(tmp_path), []
    made.config.trainer.max_restores = 0
    made.learner.save = lambda path, state: saved.append(path.name)

    async def lost(driver):
        raise LearnerError("learner rank 0 of 1 died (update)")

    with pytest.raises(LearnerError, match="died"):
        asyncio.run(Halting(made, 3, lost).run())
    assert saved == ["step_000002"]


def test_a_learner_lost_in_a_save_is_not_asked_again(tmp_path):
    made, asked = system(tmp_path), []
    made.config.trainer.max_restores = 0

    def save(path, state):
        asked.append(path.name)
        raise LearnerError("learner rank 0 of 1 died (save)")

    made.learner.save = save
    with pytest.raises(LearnerError, match="died"):
        asyncio.run(Scripted(made, {}).run())
    assert asked == ["step_000002"]


def test_a_disk_that_takes_no_checkpoint_ends_the_run_and_not_its_learner(tmp_path):
    """Else the steps since the last one would be taken again, `trainer.max_restores` times, to fail at the
    same place."""
    made, asked = system(tmp_path), []

    def save(path, state):
        asked.append(path.name)
        raise CheckpointNotWritten(f"{path} cannot be written: No space left on device")

    made.learner.save = save
    with pytest.raises(CheckpointNotWritten) as caught:
        asyncio.run(Scripted(made, {}).run())
    assert caught.value.exit_code == 3 and asked == ["step_000002"] and made.learner.starts == 0


def test_a_rollback_cut_short_is_not_saved_as_the_step_it_left(tmp_path):
    made = system(tmp_path)
    driver = Scripted(made, {5: rollback(5, 4)})

    def load(path):
        raise KeyError("cut short")

    made.learner.load = load
    with pytest.raises(KeyError):
        asyncio.run(driver.run())
    assert checkpoints(made) == ["step_000002", "step_000004"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_heard_while_the_model_is_made(tmp_path, monkeypatch, number, code):
    made = system(tmp_path)
    made.folder.close()
    started(made, monkeypatch)

    def resolve(path):
        os.kill(os.getpid(), number)
        for _ in range(1000):
            pass
        raise AssertionError("goes on after the signal")

    monkeypatch.setattr(runs.models, "resolve", resolve)
    with pytest.raises(signals.Stopped) as caught:
        trained(made)
    assert caught.value.exit_code == code == summary(made)["exit"]
    time.sleep(2 * signals.REPEAT_SECONDS)
    heard = []
    with signals.listening(heard.append):
        os.kill(os.getpid(), number)
    assert heard == [number]
