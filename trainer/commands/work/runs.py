"""The commands that run a model: `train`, `warm-start`, `eval`, `demo`; and `export` of a checkpoint.

Their options are read here. Their work is imported when they are called, because it needs torch and Ray.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from services.common.errors import UserError
from services.common.files import write_json
from services.common.loading.lazy import LazyModule
from services.common.loading.own_packages import refuse_others_here
from services.common.names import near_path
from services.common.printing.commands import typed
from services.common.printing.completed import kept_in
from services.common.printing.console import Console
from services.common.printing.help_pages import CHECKPOINT, RUN
from services.common.processes import signals
from services.common.users_files import make_folder, one_out, refuse_to_lose, refuse_to_replace
from trainer.commands import completion
from trainer.commands.options import OF_ANY_RUN, AsJson, ConfigFile, Overrides, Overwrite, refuse_run
from trainer.commands.terminal import ending, for_people, prints_aside
from trainer.commands.version import code_versions
from trainer.commands.work.in_words import (
    overall_in_words,
    run_in_words,
    scores_in_words,
    taught_in_words,
    unsearched_in_words,
)
from trainer.commands.work.shown_answers import show_on_pages
from trainer.config.schema import Config, load_config
from trainer.data import models
from trainer.data.relative_paths import looked_for, where_looked
from trainer.lab import demo as _lab  # noqa: F401  # registers the names of its models and files (lab:0)
from trainer.learner.checkpoint import find, latest, named, refuse_used
from trainer.learner.export import export_checkpoint
from trainer.session.gpus import check_gpus_here
from trainer.session.output import last_words, non_blocking
from trainer.suite.rows import ANSWERS_FILE
from trainer.suite.shown.tables import markdown

if TYPE_CHECKING:
    from trainer.commands.work import evaluate as evaluating
    from trainer.commands.work import evaluate_suite as suites
    from trainer.commands.work import warm_start as warming
    from trainer.lab import show
    from trainer.session import run as running
    from trainer.session.preflight import named_files
else:  # they need torch and Ray
    evaluating = LazyModule("trainer.commands.work.evaluate")
    suites = LazyModule("trainer.commands.work.evaluate_suite")
    show = LazyModule("trainer.lab.show")
    named_files = LazyModule("trainer.session.preflight.named_files")
    running = LazyModule("trainer.session.run")
    warming = LazyModule("trainer.commands.work.warm_start")


def _say(text: str) -> None:
    """Progress goes to standard error, with its commands as they can be typed here."""
    typer.echo(typed(text), err=True)


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion.checkpoints,
            help=f"{CHECKPOINT}, to go on with; latest or best: of the run of "
            "--config, run.dir/run.name, which with latest begins at step 1 where there is none yet.",
        ),
    ] = None,
    allow_changed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            autocompletion=completion.leaves,
            help="With --resume: go on though this key has changed. Repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a policy. The run's files go to run.dir/run.name."""
    refuse_run("--resume", overrides or [])
    if allow_changed and resume is None:
        raise UserError("--allow-changed: goes with --resume latest or --resume PATH")
    settings = load_config(config, overrides or [])
    try:
        with looked_for(config, settings), prints_aside(as_json):
            if resume is None:  # a resumed run has its folder
                refuse_used(settings.run_dir)  # before what takes seconds to load
                named_files.check_named_files(settings)
            check_gpus_here(settings)
            summary = running.train(
                settings,
                resume=resume,
                allow_changed=allow_changed or [],
                console=Console(stderr=True) if as_json else None,
                code=code_versions(),
            )
    except signals.Stopped as stopped:
        raise stopped.with_advice(what_is_kept(settings.run_dir)) from None
    if latest(settings.run_dir, checksums=False) is not None:
        _say(f"next: {'; '.join(next_commands(settings.run_dir))}")
    report = str((settings.run_dir / "report.html").resolve())
    last_words(ending(f"{run_in_words(summary)}\nreport: {report}", summary | {"report": report}, as_json))


def next_commands(run: Path) -> list[str]:
    """What a user may type once a run has ended."""
    name = shlex.quote(str(run))
    return [
        f"unspiral eval --config {shlex.quote(str(run / 'config.yaml'))} --checkpoint {name}",
        f"unspiral ask --checkpoint {name} 'QUESTION'",
        f"unspiral export {name} FOLDER",
    ]


def what_is_kept(run: Path) -> str:
    """Checkpoint and report of a run that was stopped, as `checkpoint: PATH; report: PATH`."""
    found = {"checkpoint": latest(run, checksums=False), "report": run / "report.html"}
    return "; ".join(f"{name}: {path}" for name, path in found.items() if path and path.exists())


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
    trajectories: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help=f"{RUN}: learn from its right trajectories instead of composed ones (rejection sampling).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Teach a model the search and answer tags, on demonstrations composed with the retriever. Then train
    from --out."""
    settings = load_config(config, overrides or [])
    before = _inode(out)
    try:
        with looked_for(config, settings), prints_aside(as_json):
            done = warming.run_warm_start(
                settings,
                out,
                questions=questions,
                epochs=epochs,
                batch=batch,
                lr=lr,
                trajectories=trajectories,
                say=_say,
            )
    except signals.Stopped as stopped:
        kept = f"no model was written to {out}"
        if (now := _inode(out)) is not None:
            kept = f"written to {out}" if now != before else f"{out} is as it was"
        raise stopped.with_advice(kept) from None
    typer.echo(ending(f"{taught_in_words(done)}\nwritten to {out}", done | {"out": str(out)}, as_json))
    others = [shlex.quote(one) for one in overrides or [] if not one.startswith("model.path=")]
    way = " ".join(["unspiral eval --config", str(config), *others, f"model.path={out}"])
    _say(f"next: {way}; where its EM is near 1 already, training has little to teach: take harder questions")


def _inode(folder: Path) -> int | None:
    """Tells whether a folder has been replaced meanwhile: the one before it is there until the new one has
    its name."""
    return folder.stat().st_ino if folder.exists() else None


def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion.checkpoints,
            help=f"{CHECKPOINT}, latest or best: of the run of --config, run.dir/run.name. "
            "Default: model.path.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Question file; with --suite a folder. Default: data.eval of the configuration."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Score only the first N questions.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="JSON file for the scores. Default: print them. With --suite a folder; default: the run's."
        ),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            help="JSONL file for every answer with its searches. Default: NAME.answers.jsonl beside --out, "
            "otherwise eval/answers.jsonl in the run's folder."
        ),
    ] = None,
    overwrite: Overwrite = False,
    suite: Annotated[
        str | None,
        typer.Option(
            autocompletion=kept_in("trainer.suite.sets:SUITES"),
            help="search7: the papers' seven sets, with averages, intervals and kept answers.",
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            autocompletion=kept_in("trainer.suite.methods:METHODS"),
            help="With --suite: agent, direct, cot, rag or search-o1.",
        ),
    ] = "agent",
    split: Annotated[
        str,
        typer.Option(
            autocompletion=kept_in("trainer.suite.sets:splits"),
            help="With --suite: test, dev or train. Default: test, dev where there is none.",
        ),
    ] = "auto",
    limit_per_source: Annotated[
        int | None, typer.Option(min=1, help="With --suite: N questions of each set, drawn by seed.")
    ] = None,
    samples: Annotated[
        int,
        typer.Option(min=0, help="With --suite: N answers more per question, for sampled mean and pass@k."),
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Score held-out questions by greedy decoding: exact match, F1, searches and the share answered for each
    data source, every row once. `unspiral eval compare A B` compares two, question by question."""
    refuse_run("--checkpoint", overrides or [])
    settings = load_config(config, overrides or [])
    if checkpoint is not None:
        named(checkpoint, settings.run_dir)  # before what takes seconds to load
    if suite is not None:
        if answers is not None or as_json or overwrite:
            raise UserError(
                "eval: --answers, --json and --overwrite go without --suite, whose folder holds all of it"
            )
        with looked_for(config, settings):
            _evaluate_suite(
                settings,
                limit,
                suite=suite,
                method=method,
                data=data,
                split=split,
                limit_per_source=limit_per_source,
                samples=samples,
                checkpoint=checkpoint,
                out=out,
            )
        return
    if (method, split, limit_per_source, samples) != ("agent", "auto", None, 0):
        raise UserError("eval: --method, --split, --limit-per-source and --samples go with --suite search7")
    asked = str(data) if data else settings.data.eval
    if asked is not None and not models.is_there(asked):
        looked = "" if data else where_looked(config, [asked])
        raise UserError(
            f"{'--data' if data else 'data.eval:'} {asked}: no such file or folder{near_path(asked)}{looked}"
        )
    run_eval = evaluating.run_eval
    read = {"--config": config, "--data" if data else "data.eval": asked}
    if out:
        refuse_to_lose("--out", out, read)
        _make_room("--out", out)
        refuse_to_replace(f"--out {out}", out, overwrite)
    given = answers or out  # otherwise the command's own place
    answers = answers or (
        out.with_suffix(".answers.jsonl") if out else settings.run_dir / "eval" / ANSWERS_FILE
    )
    refuse_to_lose("--answers", answers, read)
    if out and answers.absolute() == out.absolute():
        raise UserError(f"--answers {answers}: is --out too; give two files")
    _make_room("--answers", answers)
    if given:
        refuse_to_replace(f"--answers {answers}", answers, overwrite)
    scored = False

    def keep(scores: dict[str, Any]) -> None:
        nonlocal scored
        if out:
            write_json(out, scores, indent=1)
        scored = True

    try:
        with looked_for(config, settings), prints_aside(not for_people(as_json)):
            scores = run_eval(
                settings,
                checkpoint=checkpoint,
                data=data,
                limit=limit,
                answers=answers,
                on_scores=keep,
                say=_say,
            )
    except signals.Stopped as stopped:
        kept = f"scores written to {out}" if out else f"no scores were printed; answers written to {answers}"
        raise stopped.with_advice(kept if scored else "no scores were written") from None
    show_on_pages(answers, settings.run_dir, _say)
    if hint := unsearched_in_words(scores, config):
        _say(hint)
    typer.echo(f"answers written to {answers}", err=True)
    if out:
        typer.echo(f"{overall_in_words(scores)}, written to {out}")
    else:
        typer.echo(scores_in_words(scores) if for_people(as_json) else json.dumps(scores, indent=1))


def _make_room(option: str, file: Path) -> None:
    """The folder of a file that is written after the scoring, which takes minutes. Raises UserError."""
    make_folder(file.parent, f"{option} {file}: its folder")
    if file.is_dir():
        raise UserError(f"{option} {file}: is a folder; expected the name of a file")


def _evaluate_suite(settings: Config, limit: int | None, **asked: Any) -> None:
    """`eval --suite`: the table on standard output, progress on standard error."""
    if limit is not None:
        raise UserError(
            "eval: --limit takes the first rows of one file; with --suite give --limit-per-source"
        )
    options = suites.SuiteOptions(**asked)
    result = suites.run_suite(settings, options, say=_say)
    typer.echo(markdown(result), nl=False)
    typer.echo(f"written to {options.folder(settings)}")


def demo(
    collapse: Annotated[
        bool,
        typer.Option("--collapse", help="Train without and with LLDS, side by side, where plain GRPO falls."),
    ] = False,
    folder: Annotated[Path, typer.Option("--dir", help="Folder of the runs.")] = Path("runs"),
    seed: Annotated[int, typer.Option(min=0, help="World, warm start and sampling.")] = 0,
    seeds: Annotated[
        int, typer.Option(min=1, max=20, help="With --collapse: how many seeds, from --seed on.")
    ] = 1,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps. Default: 12, and 90 with --collapse.")
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Make the warm-started model again instead of taking it from the cache."
        ),
    ] = False,
    resume: Annotated[
        Literal["latest"] | None,
        typer.Option(help="Go on with the demo of this --dir and --seed that was stopped."),
    ] = None,
) -> None:
    """Run the whole system on this machine: a tiny model learns to search a made-up encyclopaedia."""
    refuse_others_here()
    console = Console()
    make_folder(folder, f"--dir {folder}")
    with non_blocking(console):
        if collapse:
            every = list(range(seed, seed + seeds))
            show.run_collapse(
                folder, every, steps=steps, fresh=fresh, resume=resume is not None, console=console
            )
        else:
            show.run_demo(folder, seed, steps=steps, fresh=fresh, resume=resume is not None, console=console)


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            autocompletion=completion.checkpoints,
            help=f"{CHECKPOINT}, {OF_ANY_RUN}.",
        ),
    ],
    folder: Annotated[Path | None, typer.Argument(metavar="OUT", help="Folder to make.")] = None,
    out: Annotated[Path | None, typer.Option(help="The same as OUT.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON: the checkpoint, and the folder.")] = False,
) -> None:
    """Write a checkpoint as a plain Hugging Face folder."""
    out = one_out("export", folder, out)
    with signals.raised():  # so that gigabytes that are half written are removed
        found = find(checkpoint, say=lambda line: typer.echo(line, err=True))
        export_checkpoint(found, out)
    made = {"checkpoint": str(found), "out": str(out)}
    typer.echo(json.dumps(made) if as_json else f"{found} written to {out}")
