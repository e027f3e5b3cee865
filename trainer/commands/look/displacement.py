"""`unspiral displacement`: what one update does to a checkpoint's answers to fixed prompts."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.common.counting import counted
from services.common.errors import UserError
from services.common.files import write_atomically
from services.common.loading.lazy import LazyModule
from services.common.printing.help_pages import CHECKPOINT
from services.common.users_files import given_as, make_folder, refuse_to_replace
from services.likelihood.exports.fixed_prompts import FOLDER, said_of_similarity
from trainer.commands import completion
from trainer.commands.agent.source import agent_spec, named
from trainer.commands.options import OF_ANY_RUN, AsJson, Overwrite
from trainer.commands.terminal import for_people
from trainer.data.named_columns import questions_in
from trainer.lab import demo as _lab  # noqa: F401  # registers the names of its models and files (lab:0)
from trainer.learner.checkpoint import step_of

if TYPE_CHECKING:
    from trainer.loop.update import fixed_prompts
else:  # it needs torch and an engine
    fixed_prompts = LazyModule("trainer.loop.update.fixed_prompts")


def displacement(
    checkpoint: Annotated[
        str,
        typer.Argument(
            autocompletion=completion.checkpoints,
            help=f"{CHECKPOINT}, {OF_ANY_RUN}.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            autocompletion=completion.changes,
            help="Changes to its configuration, such as learner.lr=1e-5.",
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="The first N questions.")] = 50,
    samples: Annotated[int, typer.Option(min=2, help="Sampled answers per question.")] = 8,
    data: Annotated[
        str | None, typer.Option(help="Question file. Default: data.train of the configuration.")
    ] = None,
    retriever: Annotated[
        str | None, typer.Option(metavar="URL|INDEX", help="As for `ask`. Default: the run's own.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON file. Default: displacement/step_N.json in the run's folder.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Measure what one update does to sampled answers, on the same prompts for every checkpoint. Each
    prompt's group takes one optimiser step from the checkpoint's weights, which stay as they
    are. `unspiral report --paper` draws the result."""
    if out is not None:
        refuse_to_replace(f"--out {out}", out, overwrite)
        make_folder(out.parent, f"--out {out}: its folder")
    source = named(checkpoint, overrides or [])
    if source.checkpoint is None:
        raise UserError(f"displacement {checkpoint}: a model's folder; expected a checkpoint or a run")
    if out is None and source.run is None:
        raise UserError(f"displacement {checkpoint}: it lies in no run's folder; pass --out FILE")
    step = step_of(source.checkpoint)
    out = out or (source.run or Path()) / FOLDER / f"step_{step:06d}.json"
    asked = data or source.config.data.train
    with given_as("--data" if data else "data.train:", asked):
        questions = questions_in(source.config.data, asked).rows[:prompts]

    def say(text: str) -> None:
        typer.echo(text, err=True)

    with ExitStack() as parts:
        spec = agent_spec(checkpoint, retriever, overrides or [], None, parts, say)
        groups = fixed_prompts.measure(
            source.config, Path(spec.model_path), spec.retriever_url, questions, samples, say
        )
    made = fixed_prompts.record(
        groups,
        checkpoint=source.name,
        step=step,
        loss=source.config.algorithm.loss,
        lr=source.config.learner.lr,
        samples=samples,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, json.dumps(made, ensure_ascii=False))
    typer.echo(in_words(made["summary"]) if for_people(as_json) else json.dumps(made["summary"]))
    say(f"written to {out}")


def in_words(summary: dict[str, Any]) -> str:
    """What the summary says: a line for right and one for wrong answers, and one for their hidden states."""
    lines = [
        f"{counted(summary['prompts'], 'prompt')}, {counted(summary['responses'], 'answer')}; "
        f"{summary['moved']} of them are of "
        "groups with both right and wrong ones, or other rewards that differ"
    ]
    for name in ("right", "wrong"):
        part = summary[name]
        if part["responses"]:
            lines.append(
                f"{name}: {part['fell']:.0%} of {part['responses']} lost likelihood, median "
                f"{part['median']:+.4f} nats per token"
            )
    if line := said_of_similarity(summary["similarity"]):
        lines.append(line)
    return "\n".join(lines)
