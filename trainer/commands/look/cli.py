"""The commands that look into a recorded run: `trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer.commands.lazy import load

Run = Annotated[str, typer.Argument(help="A run's folder, a file or checkpoint in it, or latest.")]


def trace(
    run: Run,
    step: Annotated[int, typer.Argument(min=1, help="The step.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file. Default: trace_RUN_STEP.json in the current folder."),
    ] = None,
) -> None:
    """Write a step's timeline as a trace-event file. It holds rollouts by worker, searches, update and sync;
    open it in ui.perfetto.dev or chrome://tracing."""
    write_trace = load("trainer.commands.look.trace:write_trace")
    file, spans = write_trace(run, step, out)
    workers = {t.worker for t in spans.trajectories}
    typer.echo(
        f"{file}: step {spans.step}, {spans.ended - spans.began:.2f} s, {len(spans.trajectories)} "
        f"trajectories on {len(workers)} workers"
    )
