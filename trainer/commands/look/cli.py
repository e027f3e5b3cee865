"""The commands that look into recorded runs: `runs`, `trajectories` and `trace`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.common.counting import counted
from services.common.loading.lazy import LazyModule
from services.common.printing.help_pages import REPLACES, RUN

if TYPE_CHECKING:
    from trainer.commands import completion
    from trainer.commands.look import listing, trajectories
    from trainer.commands.look import trace as tracing
else:  # pydantic and the stores take time, which a page of help need not wait for
    completion = LazyModule("trainer.commands.completion")
    listing = LazyModule("trainer.commands.look.listing")
    tracing = LazyModule("trainer.commands.look.trace")
    trajectories = LazyModule("trainer.commands.look.trajectories")

Run = Annotated[str, typer.Argument(metavar="RUN", help=f"{RUN}.")]


def completed_steps(ctx: typer.Context, incomplete: str) -> list[str]:
    """Of `completion`, which is imported when a shell asks."""
    return completion.steps(ctx, incomplete)


def completed_step_numbers(ctx: typer.Context, incomplete: str) -> list[str]:
    """Those without the evaluations."""
    return completion.step_numbers(ctx, incomplete)


Which = Annotated[
    str | None,
    typer.Argument(
        metavar="STEP",
        autocompletion=completed_steps,
        help="A step, or an evaluation such as eval_after_greedy. Default: the newest step.",
    ),
]
Limit = Annotated[int, typer.Option(min=1, help="Most that are shown.")]
AsJson = Annotated[bool, typer.Option("--json", help="The lines as they are stored.")]


def runs(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of runs, as run.dir names it; or one run: its folder, name, or latest."),
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="The list as JSON.")] = False,
) -> None:
    """List the runs of a folder, the newest first: state, step, reward, held-out score and phase."""
    found = listing.runs_in(folder)
    typer.echo(listing.as_json(found) if as_json else "\n".join(listing.table(found)))


trajectories_app = typer.Typer(no_args_is_help=True, help="Look at the trajectories of a run.")


@trajectories_app.command("show")
def show_trajectories(
    run: Run,
    step: Which = None,
    group: Annotated[str | None, typer.Option(help="Those of one group (prompt) alone.")] = None,
    uid: Annotated[str | None, typer.Option(help="One trajectory alone.")] = None,
    limit: Limit = 10,
    as_json: AsJson = False,
) -> None:
    """Print trajectories whole. Where the store has their tokens, each is coloured by what the update did to
    it: red ones fell, blue ones rose, LLDS pulls up the underlined ones."""
    trajectories.run_show(run, step, group=group, uid=uid, limit=limit, as_json=as_json)


@trajectories_app.command("find")
def find_trajectories(
    run: Run,
    text: Annotated[
        str | None, typer.Argument(help="A text in the question, the answers or what was written.")
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(autocompletion=completed_steps, help="One step or evaluation. Default: all."),
    ] = None,
    right: Annotated[
        bool | None,
        typer.Option(
            "--right/--wrong",
            help="Those that the reward calls right (reward.right_at), of an evaluation the exact matches; "
            "or the others.",
        ),
    ] = None,
    invalid: Annotated[
        bool, typer.Option("--invalid", help="Those with an action that neither searches nor answers.")
    ] = False,
    truncated: Annotated[bool, typer.Option("--truncated", help="Those that ran out of room.")] = False,
    source: Annotated[str | None, typer.Option(help="Those of one data source.")] = None,
    falls: Annotated[
        bool, typer.Option("--falls", help="Those that lost most likelihood first, of the store's sample.")
    ] = False,
    longest: Annotated[bool, typer.Option("--longest", help="The longest first.")] = False,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List trajectories by text, outcome or loss of likelihood, one line each."""
    wanted = trajectories.Wanted(text, right, invalid, truncated, source)
    trajectories.run_find(run, wanted, step=step, falls=falls, longest=longest, limit=limit, as_json=as_json)


@trajectories_app.command("diff")
def diff_trajectories(
    run: Run,
    before: Annotated[
        str,
        typer.Argument(
            autocompletion=completed_steps, help="A step, or an evaluation such as eval_before_greedy."
        ),
    ],
    after: Annotated[
        str, typer.Argument(autocompletion=completed_steps, help="Another one with the same prompts.")
    ],
    question: Annotated[str | None, typer.Option(help="Prompts that hold this text alone.")] = None,
    limit: Limit = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a prompt: its trajectories on both sides.")
    ] = False,
) -> None:
    """Show how the trajectories of the same prompts differ between two steps or evaluations. The prompts
    whose reward changed most come first."""
    trajectories.run_diff(run, before, after, question=question, limit=limit, as_json=as_json)


def trace(
    run: Run,
    step: Annotated[
        int | None,
        typer.Argument(
            min=1, autocompletion=completed_step_numbers, help="The step. Default: the newest one."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The file. Default: traces/step_STEP.json in the run's folder."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help=REPLACES)] = False,
) -> None:
    """Write a step's timeline as a trace-event file. It holds rollouts by worker, searches, update and sync;
    open it in ui.perfetto.dev or chrome://tracing."""
    file, spans = tracing.write_trace(run, step, out, overwrite=overwrite)
    workers = {t.worker for t in spans.trajectories}
    typer.echo(
        f"{file}: step {spans.step}, {spans.ended - spans.began:.2f} s, "
        f"{counted(len(spans.trajectories), 'trajectory', 'trajectories')} on "
        f"{counted(len(workers), 'worker', 'workers')}"
    )
