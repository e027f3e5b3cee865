"""Words that a shell completes: keys of the configuration, runs and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import typer

from services.common.runs.paths import LATEST, RUNS, is_run
from trainer.config.schema import Config, leaf_keys, paths_of, section_of
from trainer.rewards import KINDS

TEMPLATES = ("search_r1", "hermes", "llama3", "lab")
"""Of `rollout.template`, beside an import path."""


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
    named = {"reward.kind": KINDS, "rollout.template": TEMPLATES}
    if key in named:
        return list(named[key])
    return list(dict.fromkeys(_words(annotation_of(key)))) if key in leaf_keys() else []


def _words(annotation: Any) -> Iterator[str]:
    """Those of literals, flags and of what may be left out, in any union."""
    if annotation is bool:
        yield from ("true", "false")
    elif annotation is type(None):
        yield "null"
    elif get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    else:
        for part in get_args(annotation):
            yield from _words(part)


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
    """latest, and the runs in runs/."""
    found = sorted(str(run) for run in RUNS.iterdir() if is_run(run)) if RUNS.is_dir() else []
    return [word for word in (LATEST, *found) if word.startswith(incomplete)]


def keys(incomplete: str) -> list[str]:
    """Sections and keys, for `config explain`."""
    return [key for key in paths_of(Config) if key.startswith(incomplete)]


def checkpoints(incomplete: str) -> list[str]:
    """latest, best, the runs in runs/, and the checkpoints of the run that is named."""
    return [word for word in _checkpoints(incomplete) if word.startswith(incomplete)]


def _checkpoints(incomplete: str) -> Iterator[str]:
    yield from (LATEST, "best")
    for run in sorted(RUNS.iterdir()) if RUNS.is_dir() else ():
        if is_run(run):
            yield str(run)
            if incomplete.startswith(str(run)):
                yield from (str(one) for one in sorted((run / "checkpoints").glob("*")))
