"""Values from outside: a number or none, and what pydantic refuses, which becomes an error of ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pydantic import ValidationError


def number_of(value: object) -> float | None:
    """A finite number; None for anything else: true and false, NaN, a whole number beyond every float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


@contextmanager
def fitting(refuse: Callable[[ValidationError], Exception]) -> Iterator[None]:
    """Around a validation of what came from outside. Raises what `refuse` makes of its mistakes."""
    try:
        yield
    except ValidationError as error:
        raise refuse(error) from error
