"""Pydantic at the edge: a value from outside that does not fit becomes an error of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pydantic import ValidationError


@contextmanager
def fitting(refuse: Callable[[ValidationError], Exception]) -> Iterator[None]:
    """Around a validation of what came from outside. Raises what `refuse` makes of its mistakes."""
    try:
        yield
    except ValidationError as error:
        raise refuse(error) from error
