"""Back to a checkpoint in mid-run, as the next attempt: because the learner was lost, or because the monitor
wants it."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any, Protocol

from services.common.errors import UserError
from services.likelihood.monitor.actions import MonitorAction, MonitorActions
from services.likelihood.records import EventRecord
from trainer.config.schema import Config
from trainer.learner.checkpoint import latest
from trainer.learner.group import LearnerError
from trainer.learner.model.model_identity import describe, differences
from trainer.loop.run.progress import Progress
from trainer.loop.run.system import StopRequests, System
from trainer.loop.update.learner_calls import LearnerCalls

FIRST_BACK_OFF_SECONDS, LAST_BACK_OFF_SECONDS = 1.0, 60.0


class Restorable(Protocol):
    """The loop, as far as going back needs it. For what the members mean see `trainer.loop.driver.Driver`."""

    config: Config
    system: System
    stop: StopRequests
    progress: Progress
    actions: MonitorActions
    first_state: dict[str, Any]
    base: Path | None
    scores: dict[str, Any]
    share_gpus: bool
    checkpointable: bool
    step: int
    attempt: int
    version: int
    restores: int
    on_learner: LearnerCalls

    async def cancel_ahead(self) -> None: ...

    async def sync(self) -> float: ...

    def state_dict(self) -> dict[str, Any]: ...

    def recall_best(self) -> None: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def event(self, event: EventRecord) -> None: ...


async def restore_learner(driver: Restorable, error: LearnerError) -> None:
    """Start the learner's ranks again, on the newest whole checkpoint. Without any it begins with the model
    itself. Raises `error` (or that of the last try) where `trainer.max_restores` are used up."""
    most = driver.config.trainer.max_restores
    system = driver.system
    while True:
        driver.checkpointable = False  # nothing can be saved, and trying would hide the cause
        if driver.restores >= most or driver.stop.requested:
            raise error
        back_off = min(LAST_BACK_OFF_SECONDS, FIRST_BACK_OFF_SECONDS * 2**driver.restores)
        driver.restores += 1
        reason = " ".join(str(error).split())[:400]
        system.folder.event("learner_lost", step=driver.step, restore=driver.restores, of=most, reason=reason)
        driver.progress.say(
            f"{reason}; starting it again from the last checkpoint "
            f"({driver.restores} of trainer.max_restores={most})"
        )
        driver.progress.stage("restoring the learner", driver.step)
        # What was sampled ahead is for steps after the lost one, and the run goes back to before it.
        await driver.cancel_ahead()
        try:
            await asyncio.to_thread(system.learner.close)
            await asyncio.sleep(back_off)
            if driver.share_gpus:  # the new ranks need the memory that the workers may hold
                await system.pool.sleep()
            await asyncio.to_thread(require_same_model, driver)
            await asyncio.to_thread(system.learner.start)
            checkpoint = await asyncio.to_thread(latest, system.folder.path) or driver.base
            state = (
                (await driver.on_learner(system.learner.load, checkpoint))[0]
                if checkpoint
                else copy.deepcopy(driver.first_state)
            )
        except LearnerError as e:
            error = e
            continue
        lost_at = driver.step
        # Evaluations since the checkpoint are not asked again: `before` comes once, and before any of them.
        scores = driver.scores
        driver.load_state_dict(state)
        driver.scores = scores
        driver.recall_best()  # the first state of a run knows no score
        driver.version += 1  # the workers take no lower one, and may hold the lost step's
        driver.checkpointable = True
        system.folder.event(
            "learner_restored",
            step=driver.step,
            attempt=driver.attempt,
            lost_at=lost_at,
            checkpoint=checkpoint and checkpoint.name,
        )
        return


def require_same_model(driver: Restorable) -> None:
    """Raise UserError where the model's folder changed while the run went on: the restored learner would be
    another one."""
    if not (identity := driver.system.identity):
        return
    folder = Path(driver.system.learner.model_path)
    config = driver.config
    found = differences(
        identity["model"], describe(folder), weights=bool(config.learner.lora or config.algorithm.kl)
    )
    if found:
        what, before, now = found[0]
        raise UserError(
            f"model.path: {folder} has changed since the run began, and its learner cannot be restored from "
            f"it: {what} was {before} and is {now}; put it back and go on with --resume latest"
        )


async def roll_back(driver: Restorable, action: MonitorAction) -> bool:
    """Go back to the newest whole checkpoint from before the fall, as the next attempt. False if none is
    kept: the run goes on, with half the learning rate too."""
    folder = driver.system.folder.path
    fell = driver.step
    checkpoint = await asyncio.to_thread(latest, folder, before=action.before_step)
    if checkpoint is None:
        text = (
            f"no checkpoint from before step {action.before_step} is kept (trainer.keep_checkpoints): "
            "going on with half the learning rate"
        )
        driver.event(EventRecord(step=fell, kind="monitor_rollback_impossible", text=text))
        return False
    await driver.cancel_ahead()
    if driver.share_gpus:
        await driver.system.pool.sleep()
    actions = driver.actions.state_dict()
    state, _ = await driver.on_learner(driver.system.learner.load, checkpoint)
    driver.load_state_dict(state)
    # Not those of the checkpoint, which know nothing of this rollback, and would try it again without end.
    driver.actions.load_state_dict(actions)
    driver.version += 1
    # Workers take no lower version than they hold: the old weights come under a new number.
    await driver.sync()
    # What was tried must outlive this process: a run that is killed now, or loses its learner, would else
    # fall the same way again.
    await driver.on_learner(driver.system.learner.save, checkpoint, driver.state_dict())
    driver.event(
        EventRecord(
            step=driver.step,
            kind="monitor_rolled_back",
            text=f"from step {fell} to {checkpoint.name}, attempt {driver.attempt}",
        )
    )
    return True
