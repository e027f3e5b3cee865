"""What a run says of itself (configuration, versions, machine, times), and what people call it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, StrictBool

from services.likelihood.records import MAX_COUNT, MAX_STEP, Record, json_data

MAX_TAGS = 20
SHOWN = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]+$"
"""Text of one line."""

Line = Annotated[str, Field(min_length=1, max_length=200, pattern=SHOWN)]
Tag = Annotated[str, Field(min_length=1, max_length=50, pattern=SHOWN)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]


class ControlPlace(Record):
    """Where a run's control plane listens."""

    url: Annotated[str, Field(max_length=200, pattern=r"^https?://[A-Za-z0-9.:\[\]_-]+$")]
    """Address without a path, such as `http://127.0.0.1:8200`."""
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """What its health check answers with."""


class AboutRecord(Record):
    """What is run, where and since when. A key that is given replaces what was posted before; the others stay
    as they are."""

    config: Annotated[dict[str, Any], AfterValidator(json_data)] | None = None
    """The configuration, without secrets. Integers have at most 64 bits."""
    versions: dict[str, Line] | None = None
    """Version by package."""
    commit: Line | None = None
    """The commit of the code that runs."""
    machine: dict[str, Line] | None = None
    """Host, system, processor, memory, GPUs."""
    started: Seconds | None = None
    """Unix seconds of the start of the newest attempt."""
    ended: Seconds | None = None
    """Unix seconds of the end of the run. It is null while the run goes on."""
    exit: int | None = Field(None, ge=-MAX_COUNT, le=MAX_COUNT)
    """The exit status that it ended with."""
    steps: int | None = Field(None, ge=0, le=MAX_STEP)
    """Number of the last step that is planned."""
    control: ControlPlace | None = None
    """The run's control plane. It is null while the run serves none."""


class LabelsRecord(Record):
    """What people call a run. A key that is given replaces what was there; the others stay as they are."""

    title: Line | None = None
    """The name that the page shows. Null shows the run's own name, which stays its address."""
    tags: list[Tag] = Field(default_factory=list, max_length=MAX_TAGS)
    hidden: StrictBool = False
    """Whether the page leaves the run out of its list. A link to it still shows it."""
