"""The time that the step in hand has after a signal: a setting, named where it counts, and what is kept."""

from __future__ import annotations

import asyncio
import signal

import pytest
from scripted_runs import Halting, listened, send
from test_trainer_monitor_actions import system

from services.common.processes import signals
from trainer.session.run import kept_so_far
from trainer.session.stopping import StopSignals


def test_the_line_about_a_signal_names_the_setting_and_what_is_kept(tmp_path):
    said = []

    async def run():
        with StopSignals(said.append, 0.05, lambda: "the run keeps no step yet") as stop:
            with stop.step_in_hand(), pytest.raises(asyncio.CancelledError):
                stop.receive(signal.SIGINT)
                await asyncio.sleep(30)

    asyncio.run(run())
    assert said == [
        "SIGINT: finishing this step, for 0.05 s at most (trainer.stop_grace_seconds); cut short then, the "
        "run keeps no step yet; a second signal stops at once",
        "the step is not done after 0.05 s: stopping (trainer.stop_grace_seconds gives it more)",
    ]


@pytest.mark.parametrize(
    ("every", "in_update", "words"),
    [
        (2, True, "the run keeps its steps up to 2"),
        (2, False, "the run keeps its steps up to 4"),
        (0, True, "the run keeps no step yet"),
    ],
)
def test_what_is_kept_is_the_last_checkpoint_or_the_last_whole_step(tmp_path, every, in_update, words):
    made, said = system(tmp_path), []
    made.config.trainer.checkpoint_every = every

    async def look(driver):
        driver.checkpointable = not in_update
        said.append(kept_so_far(made.folder, driver))
        await send(signal.SIGTERM)

    with pytest.raises(signals.Stopped):
        asyncio.run(listened(Halting(made, 4, look)))
    assert said == [words]
