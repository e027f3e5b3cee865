"""The likelihood part of the command line. `trainer/cli.py` mounts these; mistakes are raised as LikelihoodError (`exit_code`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.likelihood.records import LikelihoodError

likelihood_app = typer.Typer(help="The likelihood store's upkeep.", no_args_is_help=True)
monitor_app = typer.Typer(help="The phase monitor.", no_args_is_help=True)


def serve_likelihood(
    store: Annotated[str, typer.Option(help="File path, sqlite:PATH or redis://HOST:PORT/DB.")] = "likelihood.db",
    host: Annotated[
        str, typer.Option(help="Address to bind; beyond this machine UNSPIRAL_API_TOKEN must be set.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8100,
    token_steps: Annotated[int, typer.Option(min=1, help="Steps whose token arrays are kept.")] = 8,
) -> None:
    """Run the likelihood service alone: REST for any trainer, the live page at /."""
    from services.likelihood.launch import LikelihoodServerSettings, serve_forever

    serve_forever(
        LikelihoodServerSettings(store=store, host=host, port=port, token_steps=token_steps),
        announce=lambda line: typer.echo(line, err=True),
    )


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders (or metrics.jsonl files); several are overlaid.")],
    out: Annotated[Path | None, typer.Option(help="File to write; report.html in the first run's folder if left out.")] = None,
) -> None:
    """Write one self-contained HTML page with the curves, phases and alarms of recorded runs."""
    from services.likelihood.report import write_report

    first = runs[0] if runs[0].is_dir() else runs[0].parent
    typer.echo(write_report(runs, out or first / "report.html"))


@monitor_app.command("replay")
def replay(
    metrics: Annotated[Path, typer.Argument(help="metrics.jsonl of a run, or the run's folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Run the phase monitor over a recorded run: its phases, and the alarms it would have raised, step by step."""
    import orjson

    from services.likelihood import series
    from services.likelihood.monitor import PHASES
    from services.likelihood.run_files import read_run

    run = read_run(metrics)
    if not run.metrics:
        raise LikelihoodError(f"{metrics}: no steps in it")
    codes, alarms = run.replay()
    found = series.bands(codes, run.metrics[0]["step"], list(PHASES))
    if as_json:
        typer.echo(
            orjson.dumps(
                {"run": run.name, "steps": len(run.metrics), "phases": found, "alarms": alarms}, option=orjson.OPT_INDENT_2
            )
        )
        return
    typer.echo(f"{run.name}: {len(run.metrics)} steps, {run.metrics[0]['step']} to {run.metrics[-1]['step']}")
    for band in found:
        typer.echo(f"  {band['phase']:<12} steps {band['first']} to {band['last']}")
    for alarm in alarms:
        end = "stands" if alarm["cleared"] is None else f"ended at step {alarm['cleared']}"
        typer.echo(f"  alarm at step {alarm['step']} ({alarm['metric']}, confidence {alarm['sure']}, {end}): {alarm['seen']}")
        typer.echo(f"    {alarm['advice']}")
    if not alarms:
        typer.echo("  no alarm")
