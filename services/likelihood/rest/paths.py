"""Parts of the service's paths, checked."""

from __future__ import annotations

from typing import Annotated

import fastapi
from fastapi import Depends

from services.likelihood.records import MAX_STEP, RUN_PATTERN, check_run_name


def _named(run: Annotated[str, fastapi.Path(pattern=RUN_PATTERN)]) -> str:
    return check_run_name(run)


Run = Annotated[str, Depends(_named)]
Step = Annotated[int, fastapi.Path(ge=0, le=MAX_STEP)]
