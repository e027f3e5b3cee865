"""A run that is resumed though all is done: it ends before Ray and the engines start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.common.counting import counted
from services.common.files import hints
from services.common.runs.paths import SUMMARY
from services.likelihood.exports.report import write_report
from trainer.config.schema import Config
from trainer.loop.run.best import Best
from trainer.loop.run.run_folder import RunFolder
from trainer.loop.run.run_outcome import RunOutcome
from trainer.session.resuming.rules import Resumed

STOPPED_BY_MONITOR = 4


def why_nothing_is_left(resumed: Resumed, config: Config) -> str | None:
    """What to say where the checkpoint is of the last step and its evaluation, where one is due, is there;
    None where something is left."""
    settings, step = config.trainer, resumed.state["step"]
    best = Best(**resumed.state.get("best", {}))  # earlier versions kept none
    if settings.eval_at_ends and config.data.eval and best.asked != step:
        return None
    at = f"checkpoint {resumed.checkpoint}"
    if step >= settings.steps:
        of = f"{step} of {counted(settings.steps, 'step')}"
        if step > settings.steps:
            of = f"step {step} is done, and trainer.steps={settings.steps}"
        return f"nothing left to do: {of}, {at}; raise trainer.steps to go on"
    why = best.why_to_end(settings) if best.by == settings.best_by else None
    return why and f"nothing left to do after step {step}: {why}; {at}; raise trainer.patience to go on"


def ended_already(
    folder: RunFolder, resumed: Resumed, config: Config, say: Callable[[str], None]
) -> dict[str, Any]:
    """The summary of such a run. It is made again where the run's end was cut off, as is a report that is
    missing. Raises UserError where another process uses the folder."""
    summary = hints(folder.path / SUMMARY)
    if summary.get("exit") not in (0, STOPPED_BY_MONITOR):
        folder.open(resume=True)
        try:
            outcome = RunOutcome(config, folder)
            outcome.take_up(resumed.state)
            summary = outcome.summary() | {"seconds": round(folder.earlier_seconds, 1), "exit": 0}
            folder.summary(summary)
        finally:
            folder.close()
    report = folder.path / "report.html"
    if folder.metrics_path.exists() and not report.exists():
        write_report([folder.path], report)
        say(f"report written: {report}")
    return summary
