"""What a run says of itself to the likelihood store: at its start, and how it ended."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import psutil

from services.common.errors import EnvironmentLacks
from services.likelihood.client import LikelihoodClient
from services.likelihood.wire.about import AboutRecord, ControlPlace
from trainer.config.schema import Config, without_secrets
from trainer.learner.results import RankInfo


def about_run(
    config: Config,
    code: Mapping[str, str],
    ranks: Sequence[RankInfo],
    control: ControlPlace | None = None,
) -> AboutRecord:
    """The record of a run that starts. code: version by package; `commit` is that of the code itself."""
    machine = {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
    }
    if devices := Counter(rank.device_name for rank in ranks):
        machine["learner"] = ", ".join(f"{count} x {name}" for name, count in devices.items())
    return AboutRecord(
        config=without_secrets(config.model_dump(mode="json", by_alias=True)),
        versions={name: number for name, number in code.items() if name != "commit" and number},
        commit=code.get("commit") or None,
        machine={name: text[:200] for name, text in machine.items() if text},
        started=time.time(),
        ended=None,
        exit=None,
        steps=config.trainer.steps,
        control=control,
    )


@contextmanager
def described(
    store: LikelihoodClient, run: str, about: AboutRecord, signal: Callable[[], int | None]
) -> Iterator[None]:
    """Inside, the run goes on; on leaving, the store hears how it ended. A killed run says nothing.

    signal: number of the signal that asked the run to end, if one did."""
    store.post_about(run, about)
    status = 0
    try:
        yield
    except BaseException as error:
        number = signal()
        status = 128 + number if number else getattr(error, "exit_code", 1)
        raise
    finally:
        with suppress(EnvironmentLacks):  # the disk is full, which the run itself tells
            store.post_about(run, AboutRecord(ended=time.time(), exit=status, control=None))
