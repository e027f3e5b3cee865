"""One run from configuration to summary: signals, resume, exit status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from services.common.errors import UserError
from services.common.loading.own_packages import refuse_others_here
from services.common.printing.console import Console
from services.common.processes import signals
from services.common.runs.paths import BEST, CHECKPOINTS, LATEST, in_runs, last_step, near_run, runs_like
from services.likelihood.exports.report import write_report
from trainer.config.remarks import remarks
from trainer.config.schema import Config
from trainer.data import models
from trainer.data.cursor import PromptCursor
from trainer.learner.checkpoint import find, latest, step_of
from trainer.learner.model.asked import unlike
from trainer.loop.driver import Driver
from trainer.loop.run.progress import Progress
from trainer.loop.run.run_folder import RunFolder
from trainer.rewards import overrides
from trainer.session.about import about_run, described
from trainer.session.control import announced, served
from trainer.session.nothing_left import STOPPED_BY_MONITOR, ended_already, why_nothing_is_left
from trainer.session.on_ray.watch import RayLost, leave_without_ray, ray_watched
from trainer.session.output import complain, non_blocking
from trainer.session.own_parts import OwnParts, load_parts
from trainer.session.preflight.retrievers import check_retrievers
from trainer.session.resuming.rules import Resumed, check_allowed, go_on_from, identity_of
from trainer.session.startup import questions_of, start_system
from trainer.session.stopping import StopSignals
from trainer.session.waits import progress_of, told, waits_of
from trainer.session.watchdog import watched

STEP_SECONDS = 30.0
"""Longest wait for the update in hand once Ray has died."""
SAVE_SECONDS = 120.0
"""Longest wait for the run to have saved then; for a save that is being made, as long as it takes."""


def checkpoint_of(resume: str, folder: Path) -> Path | None:
    """`latest` (None where the run has no checkpoint yet: it starts anew), `best` of the run, or a path.
    Raises UserError."""
    if resume == "latest":
        return latest(folder)
    accepted = f"latest, best, a run's folder, or one such as {folder}/checkpoints/step_000010"
    if not resume.strip():  # an unset variable of a script; to begin anew would remove what is there
        raise UserError(f"--resume: given without a value; accepted: {accepted}")
    if resume != BEST and not in_runs(resume).exists():
        near = near_run(Path(resume), words=(LATEST, BEST))
        raise UserError(f"--resume {resume}: no such checkpoint folder{near}; accepted: {accepted}")
    found = find(resume, folder)
    own = None if lies_in(found, folder) else latest(folder, checksums=False)
    if own:
        raise UserError(
            f"run.name: {folder} holds a run already, at step {step_of(own)}, "
            f"which --resume {resume} would write over; "
            "choose another run.name, or go on with that run by --resume latest"
        )
    return found


def lies_in(checkpoint: Path, run: Path) -> bool:
    """Whether it is one of this run's."""
    mine = [place.resolve() for place in (run, run / CHECKPOINTS)]  # either may be a link
    return any(map(checkpoint.absolute().parent.resolve().is_relative_to, mine))


def begins_anew(folder: Path) -> list[str]:
    """What to say where `--resume latest` finds nothing. It is no error: a job's script gives the same
    command for the first start and for all that follow."""
    lines = [f"warning: {folder}: --resume: no earlier run is there, so this one begins anew"]
    if like := runs_like(folder):
        steps = ", ".join(f"{run} (step {last_step(run)})" for run in like)
        lines += [
            f"runs with a name like it: {steps}",
            f"to go on with one: Ctrl-C, then the same command with run.name={like[0].name}",
        ]
    return lines


def require_same_questions(resumed: Resumed, config: Config) -> None:
    """Raise UserError where the checkpoint's run took its prompts from other questions, or in another
    order."""
    if state := resumed.state.get("cursor"):
        questions = questions_of(config, config.data.train, lambda text: None)
        data = config.data
        cursor = PromptCursor(questions, config.seed, data.shuffle, resumed.allowed, data.weights)
        cursor.load_state_dict(state)


def train(
    config: Config,
    *,
    resume: str | None = None,
    allow_changed: Iterable[str] = (),
    console: Console | None = None,
    code: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run it. Returns the summary; raises signals.Stopped, or an error that has an `exit_code`.

    allow_changed: settings that may differ from the checkpoint's though a resumed run should keep them.
    code: version by package, and `commit`, for the likelihood store."""
    folder = RunFolder(config)
    allowed = check_allowed(allow_changed)
    if allowed and resume is None:
        raise UserError("--allow-changed: goes with --resume latest or --resume PATH")
    checkpoint = checkpoint_of(resume, folder.path) if resume is not None else None
    resumed = None
    if checkpoint:  # before anything in the folder is written: a run that is refused stays as it was
        with signals.raised():
            resumed = go_on_from(checkpoint, config, models.resolve(config.model.path), allowed)
            require_same_questions(resumed, config)
    console = console or Console()
    progress = Progress(config.trainer.steps, console)
    if resumed and (why := why_nothing_is_left(resumed, config)):
        if not lies_in(resumed.checkpoint, folder.path):
            raise UserError(f"--resume {resume}: {why}")
        for line in (*resumed.lines, why):
            progress.say(line)
        return ended_already(folder, resumed, config, progress.say)
    refuse_others_here()
    check_retrievers(config)
    models.check_given(config.model.path)
    own = load_parts(config)  # before there is a folder, which would be listed as a run
    again = resume is not None and folder.begun()
    folder.open(resume=resume is not None)
    began = time.monotonic()
    driver_box: list[Driver] = []
    with non_blocking(console):
        try:
            with progress:
                progress.say(f"run folder: {folder.path.resolve()}")
                if resume is not None and not checkpoint and not again:
                    progress.warn(begins_anew(folder.path))
                for remark in filter(None, [*remarks(config), overrides(own.reward, config.reward.right_at)]):
                    progress.say(remark)
                # A warm start or conversion takes minutes, and would keep an event loop from hearing signals.
                with signals.raised():
                    model = models.resolve(config.model.path)
                    models.check_trainable(model, config.model.path)
                for line in resumed.lines if resumed else filter(None, [unlike(model, config.rollout)]):
                    progress.say(line)
                summary = asyncio.run(
                    _train(config, model, folder, own, resumed, again, progress, driver_box, code or {})
                )
            return _finish(folder, summary, began, 0, progress.say)
        except BaseException as error:
            if isinstance(error, UserError) and not driver_box and folder.withdraw():
                progress.say(f"run folder removed: {folder.path.resolve()}: the run did not begin")
                raise
            summary = (driver_box[0].summary() if driver_box else {}) | {"steps": folder.last_step()}
            status = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
            _finish(folder, summary, began, status, progress.say)
            if isinstance(error, signals.Stopped):
                raise signals.Stopped(error.number, what_is_left(folder, *driver_box)) from None
            if status != STOPPED_BY_MONITOR and not folder.lost and driver_box and folder.last_step():
                progress.say(f"the run has ended: {what_is_left(folder, *driver_box)}")
            raise
        finally:
            folder.close()


def kept_so_far(folder: RunFolder, driver: Driver | None = None) -> str:
    """What a run keeps whose step is cut short now."""
    kept = latest(folder.path, checksums=False)
    step = step_of(kept) if kept else 0
    if driver is not None and driver.checkpointable:  # the learner has the weights of that step
        step = max(step, driver.step)
    return f"the run keeps its steps up to {step}" if step else "the run keeps no step yet"


def what_is_left(folder: RunFolder, driver: Driver | None = None) -> str:
    """The steps that a run has lost which was stopped or ended by an error, and how to go on: from a
    checkpoint only where there is one."""
    kept = latest(folder.path, checksums=False)
    saved = step_of(kept) if kept else driver.base_step if driver else 0
    cut = driver.unfinished if driver else None
    last = max(folder.last_step(), cut or 0)
    said = [f"step {cut} was cut short in its update"] if cut else []
    if last > saved:
        said.append(f"step {last} is lost" if last == saved + 1 else f"steps {saved + 1} to {last} are lost")
    if kept:
        said.append(f"go on after step {saved} with --resume latest")
    elif driver and driver.base:
        said.append(f"go on with --resume {driver.base}")
    else:
        said.append("no checkpoint was written")
    return "; ".join(said)


async def _train(
    config: Config,
    model: Path,
    folder: RunFolder,
    own: OwnParts,
    resumed: Resumed | None,
    again: bool,
    progress: Progress,
    box: list[Driver],
    code: Mapping[str, str],
) -> dict[str, Any]:
    """again: the folder was used by an earlier attempt."""
    loop = asyncio.get_running_loop()
    began = time.monotonic()
    first: list[BaseException] = []
    grace = config.trainer.stop_grace_seconds
    with StopSignals(progress.say, grace, lambda: kept_so_far(folder, *box)) as stop:
        try:
            async with (
                served(config, folder.path, progress.say) as control,
                start_system(
                    config,
                    model,
                    folder,
                    progress.say,
                    own=own,
                    identity=identity_of(config, model),
                    resumed=resumed,
                ) as system,
            ):
                driver = Driver(system, progress, stop)
                box.append(driver)
                if resumed:
                    driver.base = resumed.checkpoint
                    driver.base_step = resumed.state["step"]
                    driver.load_state_dict(await asyncio.to_thread(system.learner.load, driver.base))
                    progress.say(f"resumed from {driver.base}")
                elif again:
                    driver.begin_attempt()
                    progress.say(
                        f"no whole checkpoint to resume from: starting anew, as attempt {driver.attempt}"
                    )
                try:
                    about = about_run(config, code, system.learner.where, control.place())
                    with (
                        described(system.store, config.run.name, about, lambda: stop.number),
                        closing(driver.sampler.calls),
                        announced(control, driver),
                        watched(driver),
                        ray_watched(lambda lost: _ray_has_died(lost, driver, stop, loop)),
                        told(progress.say, lambda: waits_of(driver), lambda: progress_of(driver)),
                    ):
                        summary = await driver.run()
                        if stop.error is not None:
                            raise stop.error
                        progress.performance(summary)
                        stop.settle()
                    await asyncio.to_thread(driver.recorder.close)
                except BaseException as error:
                    driver.recorder.close()
                    if isinstance(stop.error, RayLost):
                        _leave_without_ray(stop.error, driver, began)
                    first.append(error)
                    raise
                return summary
        except BaseException as error:
            # What ends the run is told, not what fails after it while the parts are ended.
            told_error = first[0] if first else error
            if told_error is not error:
                progress.say(f"warning: while the run was ended: {type(error).__name__}: {error}")
            if not isinstance(told_error, asyncio.CancelledError):
                raise told_error from told_error.__cause__
            if stop.error is not None:
                raise stop.error from None
            if stop.number is None:
                raise told_error from None
            raise signals.Stopped(stop.number) from None


def _ray_has_died(lost: RayLost, driver: Driver, stop: StopSignals, loop: asyncio.AbstractEventLoop) -> None:
    """Let the step in hand end where it is about to, and the last whole step be saved. Called from the
    watch's thread."""
    over = time.monotonic() + SAVE_SECONDS
    loop.call_soon_threadsafe(stop.end_soon, lost, 0.0 if driver.checkpointable else STEP_SECONDS)
    # From this thread too, and at once: the loop may be in a call to Ray, which may end the process in it.
    complain(f"unspiral: {lost}; the last whole step is saved where Ray lets the run live on")
    while time.monotonic() < over or driver.on_learner.doing == "save":
        time.sleep(0.5)
    _leave_without_ray(lost, driver, None)  # the loop is stuck in a call to Ray


def _leave_without_ray(lost: RayLost, driver: Driver, began: float | None) -> NoReturn:
    """End the process without a clean end: only Ray ends its parts, and a call to it would block until Ray
    ends this process."""
    folder = driver.system.folder
    progress = driver.progress
    with _warned(progress.say, "no summary was written"):
        _finish(
            folder,
            driver.summary() | {"steps": folder.last_step()},
            began or time.monotonic(),
            lost.exit_code,
            progress.say,
        )
    progress.close()
    leave_without_ray(lost, f"; {what_is_left(folder, driver)}")


def _finish(
    folder: RunFolder, summary: dict[str, Any], began: float, exit_code: int, say: Callable[[str], None]
) -> dict[str, Any]:
    seconds = round(time.monotonic() - began, 1)
    summary |= {"seconds": round(folder.earlier_seconds + seconds, 1), "exit": exit_code}
    if folder.earlier_seconds:
        summary["last_part_seconds"] = seconds
    # Of a run that ended well it is the outcome; otherwise it must not hide why the run ended.
    with _warned(say, "no summary was written") if exit_code else nullcontext():
        folder.summary(summary)
    if folder.metrics_path.exists():
        with _warned(say, "no report was written"):
            folder.hold()
            write_report([folder.path], folder.path / "report.html")
    return summary


@contextmanager
def _warned(say: Callable[[str], None], what: str) -> Iterator[None]:
    """Around what is done at a run's end: whatever fails there is told, and the run's own outcome stands."""
    try:
        yield
    except Exception as error:
        say(f"warning: {what}: {error}")
