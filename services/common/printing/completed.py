"""Words that a shell completes where an option takes one of a few."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args, get_origin

from services.common.loading.lazy import LazyModule

Completion = Callable[[str], list[str]]
"""What Typer takes as `autocompletion`: the words that may stand in place of the incomplete one."""


def one_of(words: Iterable[str]) -> Completion:
    """Of words that are here."""
    kept = tuple(words)
    return lambda incomplete: [word for word in kept if word.startswith(incomplete)]


def kept_in(place: str, *others: str) -> Completion:
    """Of the words that a module keeps, which is imported when a shell asks. place: `package.module:NAME` of
    a collection, or of a function that returns one. others: words that are accepted besides, and stand
    first."""
    module, _, name = place.partition(":")
    held = LazyModule(module)

    def completed(incomplete: str) -> list[str]:
        kept = getattr(held, name)
        return one_of([*others, *(kept() if callable(kept) else kept)])(incomplete)

    return completed


def typed_so_far(context: Any, argument: str) -> str | None:
    """The value of the first argument, by its name. Behind an option without its value, which is being typed,
    Typer has given up, and has the words alone."""
    given = context.params.get(argument)
    return str(given) if given is not None else next(iter(context.args), None)


def literals(annotation: Any) -> Iterator[str]:
    """The words of an annotation: those of literals, flags and of what may be left out, in any union."""
    if annotation is bool:
        yield from ("true", "false")
    elif annotation is type(None):
        yield "null"
    elif get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    else:
        for part in get_args(annotation):
            yield from literals(part)
