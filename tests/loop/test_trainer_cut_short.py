"""A run that is cut short: by a signal that comes twice, while it samples, or in an update. Scripted steps,
real signals."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import threading
import time

import pytest
from rich.console import Console
from scripted_runs import Halting, checkpoints, listened, quick, send, started, summary, trained  # noqa: F401
from test_trainer_monitor_actions import Scripted, system

from retriever_service.errors import RetrieverUnavailable
from services.common.errors import EnvironmentLacks, UnspiralError
from services.common.processes import signals
from trainer.learner.checkpoint import CheckpointNotWritten, latest, step_folder
from trainer.session import stopping
from trainer.session.run import train


@pytest.mark.parametrize("where", ["in the step", "in the save"])
def test_a_signal_that_a_wrapper_sends_twice_is_one(tmp_path, monkeypatch, where):
    """`timeout` signals its child, then the group: the step in hand ends all the same, and is saved."""
    monkeypatch.setattr(signals, "REPEAT_SECONDS", 60.0)
    made = system(tmp_path)
    made.config.trainer.checkpoint_every = 0 if where == "in the step" else 2
    save = made.learner.save

    async def twice(driver):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.0001)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)

    def slow(path, state):
        if where == "in the save":
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.05)
        save(path, state)

    made.learner.save = slow
    driver = Halting(made, 4, twice) if where == "in the step" else Scripted(made, {})
    with pytest.raises(signals.Stopped):
        asyncio.run(listened(driver))
    saved = 4 if where == "in the step" else 2
    assert made.folder.last_step() == saved and checkpoints(made) == [f"step_{saved:06d}"]


class Sampling(Scripted):
    """At one step the rollouts take for ever: the learner still has the weights of the step before."""

    def __init__(self, system, wants):
        super().__init__(system, wants)
        self.at = 6

    async def one_step(self, step):
        if step == self.at:
            await send(signal.SIGTERM)
            await asyncio.sleep(30)
        return await super().one_step(step)


class Updating(Sampling):
    """At one step the update takes for ever."""

    async def one_step(self, step):
        if step == self.at:
            self.checkpointable = False
            self.unfinished = step
        return await super().one_step(step)


@pytest.mark.parametrize("kept", [2, 0])
def test_a_run_that_is_cut_short_while_it_samples_has_lost_nothing(tmp_path, monkeypatch, kept):
    monkeypatch.setattr(stopping, "STEP_GRACE_SECONDS", 0.05)
    made = system(tmp_path)
    made.config.trainer.checkpoint_every = kept
    made.folder.close()
    started(made, monkeypatch, Sampling)
    with pytest.raises(
        signals.Stopped, match=r"^stopped by SIGTERM; go on after step 5 with --resume latest$"
    ):
        trained(made, resume="latest")
    newest = latest(made.folder.path)
    assert newest == step_folder(made.folder.path, 5)
    state = json.loads((newest / "state.json").read_text())
    assert (state["step"], state["version"]) == (5, 5) and summary(made)["exit"] == 143
    started(made, monkeypatch)
    trained(made, resume="latest")
    lines = [json.loads(line) for line in made.folder.metrics_path.read_text().splitlines()]
    assert [m["step"] for m in lines] == list(range(1, 13))


@pytest.mark.parametrize(
    ("every", "said"),
    [
        (
            4,
            "step 6 was cut short in its update; steps 5 to 6 are lost; go on after step 4 with --resume "
            "latest",
        ),
        (5, "step 6 was cut short in its update; step 6 is lost; go on after step 5 with --resume latest"),
        (0, "step 6 was cut short in its update; steps 1 to 6 are lost; no checkpoint was written"),
    ],
)
def test_a_run_that_is_cut_short_in_an_update_says_which_steps_are_lost(tmp_path, monkeypatch, every, said):
    monkeypatch.setattr(stopping, "STEP_GRACE_SECONDS", 0.05)
    made = system(tmp_path)
    made.config.trainer.checkpoint_every = every
    made.folder.close()
    started(made, monkeypatch, Updating)
    with pytest.raises(signals.Stopped) as caught:
        trained(made, resume="latest")
    assert str(caught.value) == f"stopped by SIGTERM; {said}"


class Lacking(Sampling):
    """At one step the retriever is away for good; a step that began its update is lost by it."""

    async def one_step(self, step):
        if step == self.at:
            raise RetrieverUnavailable("retriever at http://r: no answer within 6 s")
        return await super().one_step(step)


class Failing(Updating):
    """At one step the update ends in an error."""

    async def one_step(self, step):
        if step == self.at:
            self.checkpointable = False
            self.unfinished = step
            raise EnvironmentLacks("no room")
        return await super().one_step(step)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (Lacking, "go on after step 5 with --resume latest"),
        (
            Failing,
            "step 6 was cut short in its update; steps 5 to 6 are lost; go on after step 4 with --resume "
            "latest",
        ),
    ],
)
def test_a_run_that_an_error_ends_says_how_to_go_on(tmp_path, monkeypatch, ends, said):
    """The last line stays the error's own."""
    made = system(tmp_path)
    made.config.trainer.checkpoint_every = 4
    made.folder.close()
    started(made, monkeypatch, ends)
    out = io.StringIO()
    with pytest.raises(EnvironmentLacks) as caught:
        train(made.config, console=Console(file=out, width=200), resume="latest")
    assert out.getvalue().splitlines()[-1] == f"the run has ended: {said}"
    assert "--resume" not in str(caught.value) and summary(made)["exit"] == 3
    started(made, monkeypatch)
    trained(made, resume="latest")
    lines = [json.loads(line) for line in made.folder.metrics_path.read_text().splitlines()]
    assert [m["step"] for m in lines] == list(range(1, 13))


def test_one_that_the_monitor_stops_says_nothing_of_going_on(tmp_path, monkeypatch):
    made = system(tmp_path)
    made.folder.close()

    class Watched(Lacking):
        async def one_step(self, step):
            if step == self.at:
                raise UnspiralError("stopped by the monitor", exit_code=4, explained=True)
            return await super().one_step(step)

    started(made, monkeypatch, Watched)
    out = io.StringIO()
    with pytest.raises(UnspiralError, match="monitor"):
        train(made.config, console=Console(file=out, width=200), resume="latest")
    assert "the run has ended" not in out.getvalue() and summary(made)["exit"] == 4


def test_the_steps_of_the_checkpoint_that_another_run_went_on_from_are_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "STEP_GRACE_SECONDS", 0.05)
    first = system(tmp_path)
    first.folder.close()
    first.config.trainer.steps = 4
    started(first, monkeypatch)
    trained(first, resume="latest")
    base = latest(first.folder.path)
    made = system(tmp_path, run={"name": "other", "dir": str(tmp_path)})
    made.config.trainer.checkpoint_every = 0
    made.folder.close()
    started(made, monkeypatch, Updating)
    with pytest.raises(signals.Stopped) as caught:
        trained(made, resume=str(base))
    said = "step 6 was cut short in its update; steps 5 to 6 are lost"
    assert str(caught.value) == f"stopped by SIGTERM; {said}; go on with --resume {base}"


def test_a_long_save_before_leaving_is_waited_for(tmp_path, monkeypatch):
    """LEAVE_SECONDS are for what hangs; a learner that writes its weights does not."""
    left, over, leave = [], threading.Event(), stopping.StopSignals._leave_as_it_is

    def ends(stop):
        leave(stop)
        over.set()

    monkeypatch.setattr(stopping, "STEP_GRACE_SECONDS", 0.05)
    monkeypatch.setattr(stopping, "LEAVE_SECONDS", 1.0)
    monkeypatch.setattr(stopping.StopSignals, "_leave_as_it_is", ends)
    monkeypatch.setattr(stopping.os, "_exit", left.append)
    made = system(tmp_path)
    made.config.trainer.checkpoint_every = 0
    save = made.learner.save

    def slow(path, state):
        assert over.wait(60)
        save(path, state)

    made.learner.save = slow
    with pytest.raises(signals.Stopped):
        asyncio.run(listened(Sampling(made, {})))
    assert left == [] and checkpoints(made) == ["step_000005"]


def test_a_save_that_fails_does_not_hide_why_the_run_ends(tmp_path):
    made = system(tmp_path)
    made.config.trainer.checkpoint_every = 0

    def save(path, state):
        raise CheckpointNotWritten(f"{path} cannot be written: No space left on device")

    async def lost(driver):
        driver.checkpointable = True
        raise RuntimeError("no rollout worker is left")

    made.learner.save = save
    driver, said = Halting(made, 3, lost), []
    driver.progress.say = said.append
    with pytest.raises(RuntimeError, match="no rollout worker is left"):
        asyncio.run(driver.run())
    assert said[0] == "saving step 3" and "step 3 was not saved: " in said[1]
