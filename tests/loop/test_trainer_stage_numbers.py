"""One step has one number in all that a run says of what it is doing."""

from __future__ import annotations

import asyncio
import io

from rich.console import Console
from test_trainer_monitor_actions import Scripted, system

from services.control.cli import show
from services.control.records import RunStatus
from trainer.loop.run.progress import Progress


def update():
    """What the learner does before the step counts as taken."""


def score():
    """What it does after that."""


class Staged(Scripted):
    """Each step samples, updates and scores, as `Driver.one_step` does, and tells its stages."""

    def __init__(self, system):
        super().__init__(system, {})
        self.told = []
        self.progress.stage = self.on_learner.progress.stage = lambda name, step: self.told.append(
            (step, name)
        )

    async def one_step(self, step):
        self.progress.stage("rollout", step)
        await self.on_learner(update)
        action = await super().one_step(step)
        await self.on_learner(score)
        return action


def test_all_stages_of_a_step_have_its_number(tmp_path):
    made = system(tmp_path, trainer={"steps": 3, "checkpoint_every": 0, "eval_at_ends": False})
    driver = Staged(made)
    asyncio.run(driver.run())
    of_steps = [said for said in driver.told if said[1] in ("rollout", "update", "score")]
    assert of_steps == [(n, stage) for n in (1, 2, 3) for stage in ("rollout", "update", "score")]
    assert driver.told[-1] == (3, "save"), "after a step its own number stays"
    assert (driver.step, driver.in_hand, driver.shown_step) == (3, None, 3)


def test_the_number_of_steps_done_is_not_called_a_step():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    progress = Progress(12, console)
    progress.step({"step": 3, "time/step": 1.0, "phase": "unknown"}, [])
    progress.stage("rollout", 4)
    table = progress._render()
    assert table.title.startswith("3 of 12 steps done") and table.caption == "step 4: rollout"


def test_a_status_tells_the_steps_that_are_done_from_the_one_in_hand(capsys):
    show(RunStatus(state="running", run="r", steps=12, step=3, stage="step 4: rollout"))
    assert "steps done:       3 of 12 (step 4: rollout)" in capsys.readouterr().out
