"""Words that a shell completes: keys of the configuration, runs and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from services.common.runs.paths import LATEST, RUNS, is_run
from trainer.config.schema import Config, leaf_keys, paths_of


def changes(incomplete: str) -> list[str]:
    """`learner.lr=` and all other keys."""
    return [f"{key}=" for key in leaf_keys() if key.startswith(incomplete)]


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
