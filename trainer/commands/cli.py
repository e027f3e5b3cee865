"""The command `unspiral` (also `python -m trainer`). Imports happen inside the commands, so that a plain
install runs what it can.

Exit status: 0 done; 1 a fault of ours; 2 bad usage, configuration or data; 3 the environment lacks something;
4 stopped by the monitor; 129, 130 and 143 after a clean stop by SIGHUP, SIGINT and SIGTERM.
"""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from retriever_service.cli import index_app, serve_retriever
from services.common.extras import not_imported
from services.common.files import write_atomically
from services.control.cli import pause, resume, serve_control, status, workers_app
from services.likelihood.cli import likelihood_app, monitor_app, report, serve_likelihood
from trainer.commands import version
from trainer.commands.examples import give_examples
from trainer.data.cli import data_app
from trainer.data.models import model_app
from trainer.lab import demo as _lab  # noqa: F401  # its names (lab:0) become known
from trainer.session.output import complain, last_words, unhurried

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Train search agents with GRPO + LLDS, and watch likelihood while it happens.",
)
serve = typer.Typer(no_args_is_help=True, help="Run one service alone.")
config_app = typer.Typer(no_args_is_help=True, help="Look at the configuration.")

serve.command("retriever")(serve_retriever)
serve.command("likelihood")(serve_likelihood)
serve.command("control")(serve_control)
app.add_typer(serve, name="serve")
app.add_typer(index_app, name="index")
app.add_typer(data_app, name="data")
app.add_typer(model_app, name="model")
app.add_typer(likelihood_app, name="likelihood")
app.add_typer(monitor_app, name="monitor")
app.add_typer(config_app, name="config")
app.add_typer(workers_app, name="workers")
app.command("report")(report)
for command in (status, pause, resume):
    app.command(command.__name__)(command)

MACHINE_FULL = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
)
"""Errors of the machine, not of the path that was given."""


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo("\n".join(version.lines()))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print versions and exit."),
    ] = False,
) -> None:
    """Train search agents with GRPO + LLDS, and watch likelihood while it happens."""


ConfigFile = Annotated[Path, typer.Option("--config", help="Configuration file (YAML).")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes to it, such as learner.lr=1e-5 run.name=mine.")
]


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on with the run: latest, a checkpoint, or a run's folder.")
    ] = None,
    allow_changed: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="With --resume: go on though this key has changed. Repeatable."),
    ] = None,
) -> None:
    """Train a policy. The run's files go to run.dir/run.name."""
    from trainer.config.schema import load_config

    settings = load_config(config, overrides or [])
    from trainer.session.run import train as run

    summary = run(settings, resume=resume, allow_changed=allow_changed or [])
    last_words(f"{json.dumps(summary)}\nreport: {(settings.run_dir / 'report.html').resolve()}")


@app.command("warm-start")
def warm_start(
    config: ConfigFile,
    out: Annotated[Path, typer.Option(help="Folder to make: the model that has learnt the tags.")],
    overrides: Overrides = None,
    questions: Annotated[
        int, typer.Option(min=1, help="Training questions to compose demonstrations from.")
    ] = 1000,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the demonstrations.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Demonstrations of one optimiser step.")] = 16,
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate.")] = 1e-5,
) -> None:
    """Teach a model the search and answer tags, on demonstrations composed with the retriever. Then train
    from --out."""
    from trainer.config.schema import load_config

    settings = load_config(config, overrides or [])
    from trainer.commands.warm_start import warm_start as run

    done = run(
        settings,
        out,
        questions=questions,
        epochs=epochs,
        batch=batch,
        lr=lr,
        say=lambda text: typer.echo(text, err=True),
    )
    typer.echo(json.dumps(done))
    typer.echo(f"written to {out}")


@app.command("eval")
def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="A checkpoint, a run's folder, or latest (of this run); none: model.path itself."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Question file; none: data.eval of the configuration.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Score only the first N questions.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the scores there as JSON; none: print them.")
    ] = None,
) -> None:
    """Score held-out questions by greedy decoding: exact match and F1 for each data source, every row
    once."""
    from trainer.config.schema import ConfigError, load_config

    settings = load_config(config, overrides or [])
    from trainer.commands.evaluate import run_eval

    if out:  # before the scoring, not after it
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"--out {out}: its folder cannot be made: {e.strerror}") from e
        if out.is_dir():
            raise ConfigError(f"--out {out}: is a folder; expected the name of a file")

    scores = run_eval(
        settings, checkpoint=checkpoint, data=data, limit=limit, say=lambda text: typer.echo(text, err=True)
    )
    text = json.dumps(scores, indent=1)
    if out:
        write_atomically(out, text + "\n")
        overall = scores["overall"]
        typer.echo(
            f"EM {overall['em']:.3f}  F1 {overall['f1']:.3f}  ({overall['n']} questions), written to {out}"
        )
    else:
        typer.echo(text)


@app.command()
def demo(
    collapse: Annotated[
        bool,
        typer.Option("--collapse", help="Train without and with LLDS, side by side, where plain GRPO falls."),
    ] = False,
    folder: Annotated[Path, typer.Option("--dir", help="Where the runs go.")] = Path("runs"),
    seed: Annotated[int, typer.Option(min=0, help="World, warm start and sampling.")] = 0,
    seeds: Annotated[
        int, typer.Option(min=1, max=20, help="With --collapse: how many seeds, from --seed on.")
    ] = 1,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps; none: as tried (12, and 90 with --collapse).")
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Make the warm-started model again instead of taking it from the cache."
        ),
    ] = False,
) -> None:
    """Run the whole system on this machine: a tiny model learns to search a made-up encyclopaedia."""
    from rich.console import Console

    from trainer.lab.show import run_collapse, run_demo

    console = Console()
    with unhurried(console):
        if collapse:
            run_collapse(folder, list(range(seed, seed + seeds)), steps=steps, fresh=fresh, console=console)
        else:
            run_demo(folder, seed, steps=steps, fresh=fresh, console=console)


@app.command()
def export(
    checkpoint: Annotated[
        str,
        typer.Argument(help="A checkpoint, a run's folder (its newest), or latest (of the runs in runs/)."),
    ],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
) -> None:
    """Write a checkpoint as a plain Hugging Face folder."""
    from trainer.learner.checkpoint import export_checkpoint, find

    found = find(checkpoint)
    export_checkpoint(found, out)
    typer.echo(f"{found} written to {out}")


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", help="Check what this configuration needs, too.")
    ] = None,
    role: Annotated[
        Literal["workstation", "retriever", "likelihood", "control", "node"],
        typer.Option(
            envvar="UNSPIRAL_ROLE", help="What this machine or container is for; the images set it."
        ),
    ] = "workstation",
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove what killed runs have left on this machine.")
    ] = False,
) -> None:
    """Check Python, packages, GPUs, Ray, listeners, ports, Redis, memory and disk, and say what to do."""
    from trainer.commands.doctor import run_doctor

    raise typer.Exit(run_doctor(config, role=role, clean=clean))


@config_app.command("show")
def config_show(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print the resolved configuration."""
    from trainer.config.remarks import remarks
    from trainer.config.schema import dump_config, load_config

    settings = load_config(config, overrides or [])
    typer.echo(dump_config(settings), nl=False)
    for remark in remarks(settings):
        typer.echo(remark, err=True)


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema, with what each key means."""
    from trainer.config.schema import Config

    typer.echo(json.dumps(Config.model_json_schema(by_alias=True), indent=1))


give_examples(app)


def main(argv: list[str] | None = None) -> int:
    """Run a command; a mistake of the user's becomes one line on stderr and its exit status."""
    try:
        result: Any = app(args=argv, standalone_mode=False, prog_name="unspiral")
        code = result if isinstance(result, int) else 0
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except Exception as error:
        if hasattr(error, "format_message"):  # click: bad usage
            complain(f"unspiral: {error.format_message()}")
            code = getattr(error, "exit_code", 2)
        elif hasattr(error, "exit_code"):
            complain(f"unspiral: {error}")
            code = error.exit_code
        elif isinstance(error, ModuleNotFoundError):
            what = not_imported(error)
            if (error.name or "").split(".")[0] in ("trainer", "services", "retriever_service"):
                what = (
                    f"{error.name} is a part of Unspiral and is not in {Path(__file__).parents[2]}: "
                    "the code there is not whole, or was replaced in mid-run"
                )
            complain(f"unspiral: {what}")
            code = 3
        elif (
            isinstance(error, OSError) and error.filename is not None
        ):  # a path that cannot be read, written or made
            complain(f"unspiral: {error.filename}: {error.strerror}")
            code = 3 if error.errno in MACHINE_FULL else 2
        elif isinstance(error, OSError) and error.errno in MACHINE_FULL:  # said by a library, without a name
            complain(f"unspiral: {error.strerror or error}")
            code = 3
        else:
            raise
    sys.exit(code)
