"""One run from configuration to summary: signals, resume, exit status."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from trainer.checkpoint import latest
from trainer.config import Config, ConfigError
from trainer.driver import Driver
from trainer.progress import Progress
from trainer.run_folder import RunFolder
from trainer.system import start_system


class Interrupted(Exception):
    """The run was ended by a signal, cleanly. The exit status is 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; go on with --resume latest")
        self.exit_code = 128 + number


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
    folder.open(resume=resume is not None)
    began, driver_box = time.monotonic(), []
    try:
        with Progress(config.trainer.steps, console) as progress:
            progress.say(f"run folder: {folder.path.resolve()}")
            summary = asyncio.run(_train(config, folder, checkpoint, progress, driver_box))
        return _finish(folder, summary, began, 0)
    except BaseException as error:
        if driver_box:
            _finish(folder, driver_box[0].summary(), began, getattr(error, "exit_code", 1))
        raise
    finally:
        folder.close()


async def _train(
    config: Config, folder: RunFolder, checkpoint: Path | None, progress: Progress, box: list[Driver]
) -> dict[str, Any]:
    task, received = asyncio.current_task(), []

    def stop(number: int) -> None:
        if not received:  # a second signal must not cut the clean stop short
            received.append(number)
            progress.say(f"{signal.Signals(number).name}: finishing up")
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        async with start_system(config, folder, progress.say) as system:
            driver = Driver(system, progress)
            box.append(driver)
            if checkpoint:
                driver.load_state_dict(await asyncio.to_thread(system.learner.load, checkpoint))
                progress.say(f"resumed from {checkpoint}")
            else:
                folder.cut_after(0)
            return await driver.run()
    except asyncio.CancelledError:
        if received:
            raise Interrupted(received[0]) from None
        raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _finish(folder: RunFolder, summary: dict[str, Any], began: float, exit_code: int) -> dict[str, Any]:
    from services.likelihood.report import write_report

    summary |= {"seconds": round(time.monotonic() - began, 1), "exit": exit_code}
    folder.summary(summary)
    if folder.metrics_path.exists():
        write_report([folder.path], folder.path / "report.html")
    return summary
