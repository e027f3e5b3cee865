"""Runs of the real loop and session over a scripted system, without Ray, for tests of their ends."""

from __future__ import annotations

import asyncio
import io
import json
import os
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rich.console import Console
from test_trainer_monitor_actions import Pool, Scripted

from services.common.processes import signals
from trainer.session import run as runs


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Two signals that a test sends one after the other are two."""
    monkeypatch.setattr(signals, "REPEAT_SECONDS", 0.01)


class Halting(Scripted):
    """At one step something happens between the update and the step's record."""

    def __init__(self, system, at, halt, wants=None):
        super().__init__(system, wants or {})
        self.at, self.halt, self.halted = at, halt, False

    async def one_step(self, step):
        if step == self.at:
            self.halted = True
            self.step, self.version = step, self.version + 1
            self.checkpointable = False
            self.unfinished = step
            await self.halt(self)
            self.version -= 1
        return await super().one_step(step)


def checkpoints(made):
    return sorted(p.name for p in (made.folder.path / "checkpoints").glob("step_*"))


async def listened(driver):
    """The driver's run under its signals, as `train` does it."""
    with driver.stop as stop:
        try:
            await driver.run()
            stop.settle()
        except asyncio.CancelledError:
            raise signals.Stopped(stop.number) from None


async def send(number):
    os.kill(os.getpid(), number)
    await asyncio.sleep(0.02)


# -- train(): what a run leaves, however it ends


def started(made, monkeypatch, driver_class=Scripted):
    """`train` over the scripted system: a new pool at each start."""

    @asynccontextmanager
    async def start(config, model, folder, say, *, own, identity, resumed):
        made.config, made.folder, made.pool = config, folder, Pool()
        made.identity = identity
        made.reward, made.metrics = own.reward, own.metrics
        made.learner.model_path = model
        yield made

    monkeypatch.setattr(runs, "start_system", start)
    monkeypatch.setattr(runs.models, "resolve", Path)
    monkeypatch.setattr(runs.models, "check_given", lambda name: None)  # the model's folder is none
    monkeypatch.setattr(runs, "Driver", lambda s, progress, stop: driver_class(s, {}))


def summary(made):
    return json.loads((made.folder.path / "summary.json").read_text())


def trained(made, **options):
    out = io.StringIO()
    result = runs.train(made.config, console=Console(file=out, width=200), **options)
    return result, out.getvalue()
