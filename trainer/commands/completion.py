"""Words that a shell completes: keys of the configuration, runs, their steps and checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, get_args

import typer

from services.common.errors import UserError
from services.common.loading.lazy import LazyModule
from services.common.printing.completed import kept_in, literals, typed_so_far
from services.common.runs.paths import BEST, CHECKPOINTS, LATEST, RUNS, in_runs, is_run
from trainer.algorithm_names import PolicyLossKind
from trainer.config.held_out_scores import SCORES
from trainer.config.schema import Config, leaf_keys, paths_of, section_of
from trainer.rewards import KINDS

if TYPE_CHECKING:
    from trainer.commands.look import stored
else:  # the stores take time, which a page of help need not wait for
    stored = LazyModule("trainer.commands.look.stored")

TEMPLATES = ("search_r1", "hermes", "llama3", "lab")
"""Of `rollout.template`, beside an import path."""
NAMED: dict[str, Collection[str]] = {
    "reward.kind": KINDS,
    "rollout.template": TEMPLATES,
    "algorithm.loss": get_args(PolicyLossKind),
    "trainer.best_by": SCORES,
}
"""The words of keys that take other text too, such as an import path."""
models = kept_in("trainer.data.models:KNOWN")
"""Names of models, beside folders."""


def changes(ctx: typer.Context, incomplete: str) -> list[str]:
    """`learner.lr=` and all other keys; behind `=` the values of a key that has few.

    zsh and fish give `reward.kind=f`. bash breaks words at `=`: it gives `f`, behind the words `reward.kind`
    and `=`, and puts what it gets behind the `=`.
    """
    key, equals, value = incomplete.partition("=")
    if equals and key:
        return [f"{key}={one}" for one in values(key) if one.startswith(value)]
    before = [word for given in ctx.params.values() if isinstance(given, list | tuple) for word in given]
    if incomplete in ("", "=") and before and before[-1] in leaf_keys():  # Typer leaves a lone `=` out
        return values(str(before[-1]))
    if before[-1:] == ["="]:
        return [one for one in values(str(before[-2])) if one.startswith(incomplete)]
    return [f"{key}=" for key in leaf_keys() if key.startswith(incomplete)]


def checkpoint_and_changes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Of `changes`; before them what names a checkpoint, where --checkpoint has not."""
    named = ctx.params.get("checkpoint") or any(map(_is_no_change, ctx.params.get("words") or []))
    return [*([] if named else checkpoints(incomplete)), *changes(ctx, incomplete)]


def _is_no_change(word: str) -> bool:
    return "=" not in word and word not in leaf_keys()


def values(key: str) -> list[str]:
    """The words that a key accepts, as far as they can be listed."""
    if key == "model.path":
        return models("")
    if key in NAMED:
        return list(NAMED[key])
    return list(dict.fromkeys(literals(annotation_of(key)))) if key in leaf_keys() else []


def annotation_of(key: str) -> Any:
    """The type of a dotted key."""
    model: Any = Config
    *sections, name = key.split(".")
    for section in sections:
        model = section_of(_annotation(model, section))
    return _annotation(model, name)


def _annotation(model: Any, key: str) -> Any:
    fields = model.model_fields.items()
    return next(field.annotation for name, field in fields if key in (name, field.alias))


def runs(incomplete: str) -> list[str]:
    """latest, and the runs in runs/: by name, and by path where that was begun."""
    return [word for word in (LATEST, *_runs(incomplete)) if word.startswith(incomplete)]


def _runs(incomplete: str) -> Iterator[str]:
    """Names where they alone are enough; paths where one was begun, or where another folder has the name."""
    for run in sorted(RUNS.iterdir()) if RUNS.is_dir() else ():
        if is_run(run):
            by_path = incomplete and f"{RUNS}/".startswith(incomplete[: len(str(RUNS)) + 1])
            yield str(run) if by_path or in_runs(run.name) != run else run.name


def steps(ctx: typer.Context, incomplete: str) -> list[str]:
    """Numbers of the steps, and names of the evaluations, whose trajectories the named run has."""
    return [name for name in _steps(ctx) if name.startswith(incomplete)]


def step_numbers(ctx: typer.Context, incomplete: str) -> list[str]:
    """The numbers alone."""
    return [name for name in steps(ctx, incomplete) if name.isdecimal()]


def _steps(ctx: typer.Context) -> list[str]:
    try:
        there = stored.Run(typed_so_far(ctx, "run") or LATEST).sources()
    except (UserError, OSError):
        return []
    return [str(int(name.removeprefix(stored.STEP))) if stored.is_step(name) else name for name in there]


def keys(incomplete: str) -> list[str]:
    """Sections and keys, for `config explain`."""
    return [key for key in paths_of(Config) if key.startswith(incomplete)]


def leaves(incomplete: str) -> list[str]:
    """Keys that hold a value."""
    return [key for key in leaf_keys() if key.startswith(incomplete)]


def checkpoints(incomplete: str) -> list[str]:
    """latest, best, the runs in runs/, and the checkpoints of the run that is named."""
    return [word for word in _checkpoints(incomplete) if word.startswith(incomplete)]


def _checkpoints(incomplete: str) -> Iterator[str]:
    yield from (LATEST, BEST)
    for run in _runs(incomplete):
        yield run
        if incomplete.startswith(run):
            yield from (
                f"{run}/{CHECKPOINTS}/{one.name}" for one in sorted((in_runs(run) / CHECKPOINTS).glob("*"))
            )
