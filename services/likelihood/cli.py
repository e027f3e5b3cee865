"""The likelihood part of the command line, which `trainer/commands/cli.py` mounts. Mistakes are raised as
UserError, whose `exit_code` the command ends with."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, closing
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
import typer

from services.common.counting import counted
from services.common.errors import UnspiralError, UserError
from services.common.names import accepted, near_path
from services.common.printing.commands import typed
from services.common.printing.completed import one_of, typed_so_far
from services.common.printing.help_pages import REPLACES, RUN
from services.common.runs.ends import is_over
from services.common.runs.paths import (
    LATEST,
    METRICS,
    STORE,
    in_runs,
    is_run,
    near_run,
    refuse_to_lose_records,
    run_folder,
)
from services.common.users_files import one_out, refuse_no_file, refuse_to_replace
from services.likelihood.exports import mirrors, upkeep
from services.likelihood.exports.doubts import doubts
from services.likelihood.exports.replayed import in_words
from services.likelihood.exports.report import write_report
from services.likelihood.exports.run_files import read_rules, read_run
from services.likelihood.exports.trainers import KNOWN, MAPS, chosen_map
from services.likelihood.monitor.alarms import PHASES
from services.likelihood.store import series
from services.likelihood.store.base import SAMPLE_STEPS, LikelihoodStore
from services.likelihood.store.of_folder import stores_in
from services.likelihood.store.opening import open_store

SERVER = "services.likelihood.rest.launch"
"""Imported on demand: the web framework would double the time of `unspiral --help`."""
likelihood_app = typer.Typer(help="The likelihood store's upkeep.", no_args_is_help=True)
monitor_app = typer.Typer(help="The phase monitor.", no_args_is_help=True)

STORE_VARIABLE = "UNSPIRAL_STORE"
EXPECTED = f"a store's file or address, a run, or latest; by default {STORE} in the current folder"
NO_STEPS = "no step was recorded yet (a line of metrics.jsonl is written when a step ends)"

Run = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help=f"{RUN}: its store is taken. Or whatever else --store takes."),
]
Store = Annotated[
    str | None,
    typer.Option(
        envvar=STORE_VARIABLE,
        help="File, sqlite:PATH, redis://HOST:PORT/DB, what RUN takes, or a folder of runs; give a password "
        f"in the environment variable. Default: {STORE}.",
    ),
]


def _runs_of_store(ctx: typer.Context, incomplete: str) -> list[str]:
    """The runs of the store that is named so far, for a shell."""
    try:
        with _opened(_given("", typed_so_far(ctx, "place"), ctx.params.get("store"))) as opened:
            return [info.run for info in opened.runs() if info.run.startswith(incomplete)]
    except (UnspiralError, OSError):
        return []


RunName = Annotated[
    str | None,
    typer.Option("--run", autocompletion=_runs_of_store, help="One run; all if left out."),
]
Rules = Annotated[
    Path | None,
    typer.Option(
        help="YAML with thresholds of the phase monitor (the section monitor.rules of a configuration)."
    ),
]


def serve_likelihood(
    place: Run = None,
    store: Store = None,
    host: Annotated[
        str, typer.Option(help="Address to bind; beyond this machine UNSPIRAL_API_TOKEN must be set.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8100,
    token_steps: Annotated[int, typer.Option(min=1, help="Steps whose token arrays are kept.")] = 8,
    trajectory_steps: Annotated[
        int, typer.Option(min=1, help="Steps whose trajectories are kept token by token.")
    ] = SAMPLE_STEPS,
    memory_mib: Annotated[
        int, typer.Option(min=64, help="Memory that requests in flight may hold together, in MiB.")
    ] = 1024,
    rules: Rules = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Mirror every step to TensorBoard files in this folder.")
    ] = None,
    wandb: Annotated[
        str | None, typer.Option(help="Mirror every step to this Weights & Biases project.")
    ] = None,
) -> None:
    """Run the likelihood service alone: REST for any trainer, the live page at /."""
    launch: Any = import_module(SERVER)
    store = _store_of(_given("serve likelihood", place, store))
    file = Path(store.removeprefix("sqlite:"))
    if ":" not in str(file) and not file.parent.is_dir():  # a new store there would hide a wrong path
        raise UserError(
            f"--store {store}: no folder {file.parent}; expected a file in a folder that is there (the file "
            "itself may be new), redis://HOST:PORT/DB, a run's folder, a folder of runs, or latest"
        )
    settings = launch.ServeSettings(
        store=store,
        host=host,
        port=port,
        token_steps=token_steps,
        trajectory_steps=trajectory_steps,
        memory_mib=memory_mib,
        rules=read_rules(rules),
        tensorboard=str(tensorboard) if tensorboard else None,
        wandb=wandb,
    )
    raise typer.Exit(launch.serve_forever(settings, announce=lambda line: typer.echo(typed(line), err=True)))


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help=f"{RUN}. Several are overlaid.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write; report.html in the first run's folder if left out.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help=REPLACES)] = False,
    paper: Annotated[
        bool, typer.Option("--paper", help="Draw the figures of the LLDS paper; the file is paper.html.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON: the file, and its runs.")] = False,
) -> None:
    """Write one self-contained HTML page with the curves, phases and alarms of recorded runs."""
    found = [run_folder(run) for run in runs]
    first = found[0] if found[0].is_dir() else found[0].parent
    name = "paper.html" if paper else "report.html"
    if out is not None:
        refuse_no_file("--out", out)
        refuse_to_lose_records("--out", out, found)
        if out.absolute() != (first / name).absolute():  # a report's own place
            refuse_to_replace(f"--out {out}", out, overwrite)
    file = write_report(found, out or first / name, paper=paper)
    steps = {str(run): len(read_run(run).metrics) for run in found}
    typer.echo(orjson.dumps({"report": str(file), "steps": steps}) if as_json else file)
    for run, count in steps.items():
        if not count:
            typer.echo(f"{run}: {NO_STEPS}, so its curves are empty", err=True)


@likelihood_app.command("prune")
def prune(
    place: Run = None,
    store: Store = None,
    run: RunName = None,
    keep_steps: Annotated[
        int | None,
        typer.Option(min=0, help="Forget the trajectories of all but the last N steps; curves stay."),
    ] = None,
    older_than_days: Annotated[
        float | None, typer.Option(min=0, help="Forget whole runs that were last posted to so long ago.")
    ] = None,
) -> None:
    """Forget old trajectories, or old runs. Curves and metrics of the runs that stay are kept."""
    if keep_steps is None and older_than_days is None:
        raise UserError(
            "likelihood prune: expected --keep-steps N or --older-than-days N, such as `--keep-steps 100`"
        )
    with _opened(_given("likelihood prune", place, store)) as opened:
        names = _chosen(opened, run)
        gone = upkeep.prune(opened, names, keep_steps=keep_steps, older_than_days=older_than_days)
    trajectories = counted(gone["trajectories"], "trajectory", "trajectories")
    typer.echo(f"{counted(gone['runs'], 'run')} and {trajectories} forgotten")


@likelihood_app.command("export")
def export(
    place: Run = None,
    folder: Annotated[
        str | None, typer.Argument(metavar="OUT", help="Folder; with --to wandb the name of a project.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="The same as OUT.")] = None,
    store: Store = None,
    run: RunName = None,
    to: Annotated[
        Literal["parquet", "tensorboard", "wandb"], typer.Option(help="What is written.")
    ] = "parquet",
) -> None:
    """Write runs out: Parquet (steps and actions), TensorBoard event files, or Weights & Biases."""
    if place is not None and folder is None and out is None and not (store is None and _is_store(place)):
        place, folder = None, place  # OUT alone
    given, option = (None if one is None else Path(one) for one in (folder, out))
    out = str(one_out("likelihood export", given, option))
    with _opened(_given("likelihood export", place, store)) as opened:
        for name in _chosen(opened, run):
            if to == "parquet":
                for path in upkeep.export_parquet(opened, name, Path(out)):
                    typer.echo(path)
                continue
            tensorboard = to == "tensorboard"
            mirror: mirrors.Mirror = (
                mirrors.TensorBoardMirror(out) if tensorboard else mirrors.WandbMirror(out)
            )
            typer.echo(f"{name}: {counted(upkeep.export_to(opened, name, mirror), 'step')} to {out}")


@monitor_app.command("replay")
def replay(
    metrics: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help=f"{RUN}; or another trainer's metrics as JSONL, JSON "
            "(trainer_state.json), CSV, or TensorBoard's event files.",
        ),
    ],
    rules: Rules = None,
    names: Annotated[
        str | None,
        typer.Option(
            "--map",
            autocompletion=one_of(MAPS),
            help=f"Whose names the metrics have: {', '.join(MAPS)}, or a YAML file (our name: their name). A "
            "guess by the names if left out.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Run the phase monitor over a recorded run: its phases and alarms, what it judged by, and what it
    cannot judge yet."""
    run = read_run(metrics)
    if not run.metrics:
        raise UserError(f"{metrics}: {NO_STEPS}, so there is nothing to replay")
    name_map = chosen_map(names, run.metrics)
    if name_map:
        run.metrics = [name_map.translated(m) for m in run.metrics]
    run.add_evaluations()
    judged_by, missing = run.known()
    texts = run.texts()
    read = KNOWN | (name_map.theirs if name_map else set())
    no_numbers = {name: str(one) for name, one in run.no_numbers.items() if name in read}
    missing = [name for name in missing if name not in texts]
    if no_numbers and not judged_by:
        name, what = next(iter(no_numbers.items()))
        raise UserError(f"{metrics}: {name}: holds no numbers ({what}), so there is nothing to judge by")
    if not judged_by:
        raise UserError(
            f"{metrics}: none of its metrics is one that the monitor reads; name them with --map "
            f"({', '.join(MAPS)}, or a YAML file of `our name: their name`)"
        )
    monitor = run.monitor(read_rules(rules) if rules else None)
    codes, alarms = run.replay(monitor)
    doubted = doubts(run.metrics, monitor, judged_by)
    undecided = monitor.undecided()
    found = series.bands(codes, run.metrics[0]["step"], list(PHASES))
    body = {
        "run": run.name,
        "steps": len(run.metrics),
        "map": name_map.trainer if name_map else None,
        "phases": found,
        "alarms": alarms,
        "judged_by": judged_by,
        "missing": missing,
        "no_numbers": no_numbers,
        "doubts": doubted,
        "undecided": undecided,
        "over": is_over(metrics, run.summary, run.metrics[-1]["step"]),
    }
    if as_json:
        typer.echo(orjson.dumps(body, option=orjson.OPT_INDENT_2))
        return
    for line in in_words(run, body):
        typer.echo(line)


def _given(command: str, place: str | None, option: str | None) -> str:
    """The store that was named, alone or behind --store, which the environment may give too. Raises
    UserError where both name one."""
    if place is not None and option is not None and option != os.environ.get(STORE_VARIABLE):
        raise UserError(f"{command}: {place} and --store both name a store; give one of them")
    return place or option or STORE


def _opened(url: str) -> AbstractContextManager[LikelihoodStore]:
    """A store that must be there already."""
    url = _store_of(url)
    path = Path(url.removeprefix("sqlite:"))
    if "://" not in url and not path.exists():
        near = near_path(path) or near_run(path)
        raise UserError(f"likelihood store {path}: no such file; expected {EXPECTED}{near}")
    return closing(open_store(url))


def _is_store(word: str) -> bool:
    """Whether it names a store, so that it is not meant as the place to write to."""
    named = word == LATEST or "://" in word or word.startswith("sqlite:")
    return named or _file_of(word) is not None or bool(stores_in(Path(word)))


def _file_of(word: str) -> Path | None:
    """The file of the store that a path or a run's name leads to; None where it leads to none."""
    path = in_runs(word)
    if path.is_dir() or path.name == METRICS:
        path = run_folder(path) / STORE
    return path if path.is_file() else None


def _store_of(url: str) -> str:
    """Address of a store, where it may have been given as a run, as a folder of runs, or `latest`."""
    if (file := _file_of(url)) is not None:
        return str(file)
    if url != LATEST and not in_runs(url).is_dir():
        return url
    run = run_folder(url)
    store = run / STORE
    if store.is_file():
        return str(store)
    if not is_run(run) and stores_in(run):
        return str(run)
    below = "" if is_run(run) else ", nor in a folder in it"
    raise UserError(f"--store {url}: no {STORE} in {run}{below}; a run with a store.url keeps it there")


def _chosen(store: LikelihoodStore, run: str | None) -> list[str]:
    """Names of the runs to work on: one, which must be there, or all."""
    names = [info.run for info in store.runs()]
    if run is None:
        return names
    if run not in names:
        raise UserError(f"--run {run}: no such run in the store; {accepted(run, names)}")
    return [run]
