"""One run from configuration to summary: signals, resume, exit status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from trainer.config.presets import remarks
from trainer.config.schema import Config, ConfigError
from trainer.data import models
from trainer.learner.checkpoint import latest
from trainer.loop.driver import Driver
from trainer.loop.progress import Progress
from trainer.loop.run_folder import RunFolder
from trainer.session.control import announced, served
from trainer.session.output import unhurried
from trainer.session.stopping import Interrupted, StopSignals, interruptible
from trainer.session.system import start_system
from trainer.session.watchdog import watched


def checkpoint_of(resume: str, folder: Path) -> Path | None:
    """`latest` (None where the run has no checkpoint yet: it starts anew) or a path. Raises ConfigError."""
    if resume == "latest":
        return latest(folder)
    path = Path(resume)
    if not path.is_dir():
        raise ConfigError(
            f"--resume {resume}: no such checkpoint folder; accepted: latest, or a folder such as {folder}/checkpoints/step_000010"
        )
    return path


def train(config: Config, *, resume: str | None = None, console: Console | None = None) -> dict[str, Any]:
    """Run it. Returns the summary; raises Interrupted, StoppedByMonitor, or an error that has an `exit_code`."""
    folder = RunFolder(config)
    checkpoint = checkpoint_of(resume, folder.path) if resume else None
    again = resume is not None and folder.begun()
    folder.open(resume=resume is not None)
    began, driver_box = time.monotonic(), []
    console = console or Console()
    progress = Progress(config.trainer.steps, console)
    with unhurried(console):
        try:
            with progress:
                progress.say(f"run folder: {folder.path.resolve()}")
                for remark in remarks(config):
                    progress.say(remark)
                # A warm start or conversion takes minutes, and would keep an event loop from hearing signals.
                with interruptible():
                    model = models.resolve(config.model.path)
                summary = asyncio.run(_train(config, model, folder, checkpoint, again, progress, driver_box))
            return _finish(folder, summary, began, 0, progress.say)
        except BaseException as error:
            summary = (driver_box[0].summary() if driver_box else {}) | {"steps": folder.last_step()}
            code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
            _finish(folder, summary, began, code, progress.say)
            raise
        finally:
            folder.close()


async def _train(
    config: Config,
    model: Path,
    folder: RunFolder,
    checkpoint: Path | None,
    again: bool,
    progress: Progress,
    box: list[Driver],
) -> dict[str, Any]:
    """again: the folder was used by an earlier attempt."""
    with StopSignals(progress.say) as stop:
        try:
            async with (
                served(config, folder.path, progress.say) as control,
                start_system(config, model, folder, progress.say) as system,
            ):
                driver = Driver(system, progress, stop)
                box.append(driver)
                if checkpoint:
                    driver.base = checkpoint
                    driver.load_state_dict(await asyncio.to_thread(system.learner.load, checkpoint))
                    progress.say(f"resumed from {checkpoint}")
                elif again:
                    driver.begin_attempt()
                    progress.say(
                        f"no whole checkpoint to resume from: starting anew, as attempt {driver.attempt}"
                    )
                with announced(control, driver), watched(driver):
                    summary = await driver.run()
                progress.performance(summary)
                stop.settle()
                return summary
        except asyncio.CancelledError:
            if stop.error is not None:
                raise stop.error from None
            if stop.number is None:
                raise
            raise Interrupted(stop.number) from None


def _finish(
    folder: RunFolder, summary: dict[str, Any], began: float, exit_code: int, say: Callable[[str], None]
) -> dict[str, Any]:
    from services.likelihood.exports.report import write_report

    summary |= {"seconds": round(time.monotonic() - began, 1), "exit": exit_code}
    try:
        folder.summary(summary)
    except OSError as error:
        if exit_code == 0:
            raise
        say(f"warning: no summary was written: {error}")  # and must not hide why the run ended
    if folder.metrics_path.exists():
        try:
            write_report([folder.path], folder.path / "report.html")
        except Exception as error:  # the run's own outcome stands, whatever is wrong with its report
            say(f"warning: no report was written: {error}")
    return summary
