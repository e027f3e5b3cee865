"""The held-out questions against the rest of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from services.common.errors import UserError
from services.common.names import accepted
from services.contracts import Question
from trainer.config.held_out_scores import source_in
from trainer.config.schema import Config
from trainer.data.checks.overlap import repeated
from trainer.loop.run.sources import label, largest


def check_held_out(
    config: Config, train: Sequence[Question], held_out: Sequence[Question], say: Callable[[str], None]
) -> None:
    """Raises UserError where `trainer.best_by` names a data source without a score of its own; says how many
    questions of data.eval stand in data.train too."""
    if not held_out:
        return
    _check_source(config.trainer.best_by, held_out)
    if count := repeated(held_out, train):
        say(
            f"warning: {count:,} of {len(held_out):,} questions of data.eval stand in data.train too, with "
            "an answer in common; `unspiral data validate --against` lists them"
        )


def _check_source(by: str, held_out: Sequence[Question]) -> None:
    wanted = source_in(by)
    if wanted is None:
        return
    scored = largest(Counter(label(question.data_source) for question in held_out))
    if label(wanted) not in scored:
        raise UserError(
            f"trainer.best_by={by}: data.eval has no score of a source {wanted}; {accepted(wanted, scored)}"
        )
